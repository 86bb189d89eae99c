"""The commit of an iteration: one exchange over all workers, which shows that every stage holds its gradient,
and gives all workers the same numbers to step with.

The exchange sums float64 vectors. Every slot is filled by at most one worker (the lowest live one of a stage;
for the digests of a micro-batch's data, the worker that ran it) or holds whole numbers, and is zero elsewhere.
Such a sum is exact in any order, so the verdict has the same bits on all workers, whichever are left. The sum
cannot complete anywhere before every worker has contributed, that is, before every worker holds its gradient.
It goes up and down a tree: two messages each way and worker, where a ring would need as many as there are
workers.

A stage need not wait for the verdict to step. It may step at once with the coefficient that its own numbers
suggest (`guesses`) and learn later whether that was right; see :mod:`megatron_recycle.runtime.stepper`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import torch

from megatron_recycle.errors import DataError, VerificationError
from megatron_recycle.membership import Verdict
from megatron_recycle.plan import Grid
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.tags import COMMITS
from megatron_recycle.runtime.comm.threads import Threads
from megatron_recycle.runtime.comm.tree_allreduce import add_up
from megatron_recycle.runtime.quiesce import Halt

_LONGEST_CLOSE = 5.0
"""Seconds that closing waits for a thread that waits for a verdict."""

_ALONE = 7  # scalars of a contribution: loss, weight, offer and its square, zeros, plan and its square


@dataclass
class Held:
    """The complete reduced gradient of an iteration, with its contribution to the verdict; equal on all peers but for
    ``digests``.

    Attributes:
        iteration: the iteration.
        gradient: flat, (numel,); with shards, the parts in this worker's shards, which differ between peers.
        norm_squares: this stage's squared norm, one number; with shards one for each shard.
        zeros: number of zeros in this stage's gradient.
        loss, weight: as in the verdict.
        digests: CRC-32 of the data of each micro-batch that this worker has read itself, apart for the model's first
            chunk and (the third of the key is true) for its last. Digests die with their worker: a micro-batch
            that lacks one is not compared.
        reports: (total micro-batches, width) float64, the last stage's reports of each; zeros elsewhere.
    """

    iteration: int
    gradient: torch.Tensor
    norm_squares: tuple[float, ...]
    loss: float
    weight: float
    digests: Mapping[tuple[int, int, bool], int]
    reports: torch.Tensor
    zeros: float = 0.0

    def numbers(self) -> torch.Tensor:
        """The numbers that are equal on peers, without the gradient, as one float64 vector for a copy to a peer."""
        alone = torch.tensor([*self.norm_squares, self.loss, self.weight, self.zeros], dtype=torch.float64)
        return torch.cat([alone, self.reports.flatten()])

    @staticmethod
    def count(total: int, width: int, norms: int) -> int:
        """Length of `numbers` for ``total`` micro-batches that report ``width`` numbers each, and ``norms`` norms."""
        return norms + 3 + total * width

    @classmethod
    def from_numbers(cls, iteration: int, gradient: torch.Tensor, numbers: torch.Tensor, total: int,
                     norms: int) -> Held:
        *squares, loss, weight, zeros = numbers[:norms + 3].tolist()
        return cls(iteration, gradient, tuple(squares), loss, weight, {}, numbers[norms + 3:].view(total, -1), zeros)


@dataclass(frozen=True)
class _Sum:
    """The sum of a commit over ``numbers`` (`_contribution`): this worker's before it, all workers' afterwards."""

    iteration: int
    grid: Grid
    groups: Groups
    offer: int
    plan: int
    numbers: torch.Tensor

    def add_up(self) -> None:
        add_up(self.numbers, self.groups.control, COMMITS[self.iteration])

    def verdict(self) -> tuple[Verdict, bool]:
        """As `Commit.verdict`, once the sum is complete."""
        total, members = self.grid.total, self.groups.control.size
        alone = len(self.numbers) - _ALONE - 2 * total
        norms = alone - self.grid.stages * self.groups.parts
        numbers = self.numbers.tolist()
        _compare(self.iteration, self.grid, numbers[-2 * total:-total], numbers[-total:])
        loss, weight, offers, squares, zeros, plans, plan_squares = numbers[alone:alone + _ALONE]
        if not _all_have(self.plan, plans, plan_squares, members):
            raise VerificationError(f"iteration {self.iteration}: workers followed different plans, so micro-batches "
                                    "may have been mixed up; it is not committed. This is a bug of megatron-recycle: "
                                    "restart from the last checkpoint with planner_budget 0, and report it")
        verdict = Verdict(self.iteration, loss, weight, tuple(numbers[:norms]), tuple(numbers[norms:alone]), zeros)
        return verdict, self.offer > 0 and _all_have(self.offer, offers, squares, members)


class Commit:
    """A commit; once it runs, `done` is set when its verdict is known, or will never be.

    Args:
        held: what this worker holds.
        guess: the coefficient that its own numbers suggest.
        offer: number of the better plan that this worker has been offered, 0 for none. The commit carries the
            promise to adopt it: numbers whose mean is this worker's, and whose squares' mean is its square, are
            all the same.
        plan: a number of the plan that was followed, below 2**20: shows when workers followed different plans.
        coefficient: gives the coefficient that a verdict asks for, under the script's settings for this iteration.
        heard: called with this object, in the thread that runs it, when the verdict is known, and before it is done.
        halt: where the next iteration stops if the guess was wrong; None: none is under way.
        last: the stage that computes the loss; None: the last one.

    Attributes:
        right: the coefficient that the verdict asks for, once that is `known`. It is computed once, before the script
            can set other limits for the next iteration.
    """

    def __init__(self, held: Held, grid: Grid, groups: Groups, *, guess: float, offer: int, plan: int,
                 coefficient: Callable[[Verdict], float], heard: Callable[[Commit], None] = lambda _: None,
                 halt: Halt | None = None, last: int | None = None) -> None:
        self.done = threading.Event()
        self.halt = halt
        self.right = math.nan
        self._coefficient, self._heard = coefficient, heard
        self._errors: Sequence[BaseException] | None = None
        """None until the numbers have been added up, or never will be."""
        self._sum = _Sum(held.iteration, grid, groups, offer, plan, _contribution(
            held, grid, groups, guess, offer, plan, grid.stages - 1 if last is None else last))

    def run(self) -> None:
        """Take part; returns when the commit is done, with or without a verdict."""
        try:
            self._sum.add_up()
            with suppress(DataError, VerificationError):  # no verdict then: `verdict` raises the reason
                self.right = self._coefficient(self._sum.verdict()[0])
            self._errors = ()
            self._heard(self)
        except BaseException as error:  # noqa: BLE001  (raised again in the thread that waits, and would wait for ever)
            self._errors = (error,)
        self.done.set()

    @property
    def known(self) -> bool:
        """Whether the verdict is there."""
        return self._errors == ()

    @property
    def refuted(self) -> bool:
        """Whether some stage has guessed wrong. Raises as `verdict`."""
        return self.verdict()[0].refutes(self.right)

    def verdict(self) -> tuple[Verdict, bool]:
        """The verdict, and whether every worker has the offer; call when it is `known`, or `done`.

        Raises:
            GenerationOver: the generation ended before this worker knew that all hold the iteration.
            DataError: the first and the last stage read different data.
            VerificationError: workers followed different plans.
        """
        for error in self._errors or ():
            raise error
        return self._sum.verdict()


class Committer:
    """The thread that runs one worker's commits, one after the other."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Commit | None] = SimpleQueue()
        self._last: Commit | None = None
        self._threads = Threads()

    def start(self, commit: Commit) -> None:
        """Let ``commit`` run."""
        if self._last is None or not self._last.done.is_set():
            # The first commit; or an older generation's, which ends with its handles, is not waited for.
            self._queue.put(None)
            self._queue = SimpleQueue()
            self._threads.start("recycle-commit", partial(_run_all, self._queue), _LONGEST_CLOSE)
        self._last = commit
        self._queue.put(commit)

    def close(self) -> None:
        """End the thread; waits for the last commit, whose handles have been aborted."""
        self._queue.put(None)
        self._last = None
        self._threads.close()


def _run_all(queue: SimpleQueue[Commit | None]) -> None:
    while (commit := queue.get()) is not None:
        commit.run()


def _all_have(number: int, total: float, squares: float, members: int) -> bool:
    return total == number * members and squares == number**2 * members


def _contribution(held: Held, grid: Grid, groups: Groups, guess: float, offer: int, plan: int,
                  last: int) -> torch.Tensor:
    """[norm squares | guesses | loss, weight, offers, squared, zeros, plans, squared | digests at the model's first
    chunk | digests at its last]"""
    slots, total, stage, each = grid.stages * groups.parts, grid.total, groups.me.stage, len(held.norm_squares)
    slot, norms = stage * groups.parts + groups.part, slots * each
    alone = norms + slots
    numbers = [0.0] * (alone + _ALONE + 2 * total)
    numbers[alone + 2], numbers[alone + 3] = offer, offer**2
    numbers[alone + 5], numbers[alone + 6] = plan, plan**2
    if groups.peers(stage)[0] == groups.me:
        numbers[slot * each:(slot + 1) * each] = held.norm_squares
        numbers[norms + slot] = guess
        numbers[alone + 4] = held.zeros  # whole numbers add up exactly, too
        if stage == last and groups.part == 0:
            numbers[alone], numbers[alone + 1] = held.loss, held.weight
    # A worker's parts have the same loss and data; they need not all read the data.
    if groups.part == 0 and held.digests:
        index = {place: position for position, place in enumerate(grid.items())}
        for (pipeline, microbatch, at_last), value in held.digests.items():
            numbers[alone + _ALONE + at_last * total + index[pipeline, microbatch]] = value
    return torch.tensor(numbers, dtype=torch.float64)


def _compare(iteration: int, grid: Grid, first: Sequence[float], last: Sequence[float]) -> None:
    for (pipeline, microbatch), one, other in zip(grid.items(), first, last):
        if one != other and one and other:  # 0: no worker is left that knows
            raise DataError(
                f"iteration {iteration}: the first and the last stage read different data for pipeline {pipeline}, "
                f"micro-batch {microbatch}; the dataset must give the same sample for the same index on every worker "
                "(random numbers from torch's, Python's and numpy's global generators are the same there; those of "
                "other generators, of threads and of files that change are not), and a data factory the same sequence "
                "each time")
