"""The end of an attempt that a wrong guess has made void: where its workers stop, and how they drain its transfers.

A wrong guess voids all work on the next iteration. A worker that waits for an activation or a gradient then leaves the
wait. But where a worker has parts (tensor parallelism), a sibling may be inside an action that this part has not come
to, in a collective of the framework's that only an abort would end. So all parts of a worker stop after the same
action, the last one that any of them has entered. The inputs of that action have been sent by the equal parts of other
workers. Those stop alike, after the action that sends them or a later one. So all messages that are needed come, in
their usual order, and none has to be made up.

Each part's thread that waits for the verdict sees to that, not its training thread. It keeps the training thread from
entering more actions, announces its progress to all processes, and receives the action to stop after.

All workers live then: each end of a channel can complete the transfers that the other end has begun. So nothing is
aborted, and no communicator is made again, which takes NCCL seconds. Each worker, stopped as above, opens the void
attempt, if it has not, announces how many transfers it has begun on each of its channels, and then sends and receives
the missing ones (`drain`). Equal parts of workers have channels of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from megatron_recycle.errors import GenerationOver
from megatron_recycle.plan import channels
from megatron_recycle.runtime.comm.abort import abort
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.tags import DRAINS, HALTS
from megatron_recycle.runtime.comm.tree_allreduce import add_up
from megatron_recycle.runtime.generation import Generation

OUT = -1
"""Progress of a process that is outside the attempt, and does not enter it before the verdict."""


def last_actions(entered: Sequence[int], parts: int) -> list[int] | None:
    """Number of actions after which each worker stops. ``entered``: how many each process has entered, ``parts``
    processes of each worker, or `OUT`. None if a worker's parts cannot stop alike: one is out and another is not."""
    workers = [entered[first:first + parts] for first in range(0, len(entered), parts)]
    if any(min(worker) == OUT < max(worker) for worker in workers):
        return None
    return [max(0, *worker) for worker in workers]


class Halt:
    """Where one process stops in its attempt at the iteration after ``iteration``, if the guess for that was wrong.

    Args:
        groups: the generation's handles.
        iteration: the iteration whose verdict is awaited.

    Attributes:
        decided: set once the action to stop after is known, or will never be.
    """

    def __init__(self, groups: Groups, iteration: int) -> None:
        self.decided = threading.Event()
        self._groups, self._iteration = groups, iteration
        self._cancel_token = groups.world.life.token
        self._changed = threading.Condition()
        self._entered: int | None = None
        self._frozen = self._given_up = False
        self._last: int | None = None

    @property
    def drains(self) -> bool:
        """Whether all have stopped where no thread needs to be freed by an abort."""
        return self._last is not None

    @property
    def runs_on(self) -> bool:
        """Whether a sibling has entered actions that this part has yet to run."""
        return self._last is not None and max(0, self._entered or 0) < self._last

    # ---- the thread that trains

    def begin(self) -> None:
        """The attempt begins."""
        self._come_to(0)

    def stay_out(self) -> None:
        """Keep out of the attempt, if it has not begun, until the verdict is known."""
        self._come_to(OUT)

    def enter(self, number: int) -> bool | None:
        """Whether action ``number`` (from 1) of the attempt, whose inputs are there, may begin; None: that is not
        `decided` yet."""
        with self._changed:
            if self._frozen and not self.decided.is_set():
                return None
            if self._frozen and (self._last is None or number > self._last):
                return False
            self._entered = number
            if number == self._last:
                self._cancel_token.cancel()
            return True

    def give_up(self) -> None:
        """The generation is over."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def _come_to(self, entered: int) -> None:
        with self._changed:
            if self._entered is None:
                self._entered = entered
                self._changed.notify_all()

    # ---- the thread that waits for the verdict

    def agree(self) -> None:
        """The guess was wrong: agree with all others where to stop, and free the training thread if it is there."""
        groups = self._groups
        with self._changed:
            if groups.parts > 1:
                self._changed.wait_for(lambda: self._entered is not None or self._given_up)
            self._frozen = True
            entered = OUT if self._entered is None else self._entered
        try:
            last = self._ask(entered) if groups.parts > 1 else max(0, entered)
        except BaseException as error:
            self._decide(None)
            if not isinstance(error, GenerationOver):
                raise
            return  # the verdict counts all the same
        if last is None:
            self.break_off()
        else:
            self._decide(last)

    def break_off(self) -> None:
        """Free the training thread from whatever it is in."""
        groups = self._groups
        self._decide(None)
        if groups.siblings is None:
            self._cancel_token.cancel()
        else:
            abort([groups.world, groups.siblings], groups.teardown.threads)

    def _ask(self, entered: int) -> int | None:
        groups = self._groups
        mine = groups.rank(groups.me)
        all_of_them = torch.zeros(len(groups.members) * groups.parts, dtype=torch.float64)
        all_of_them[mine * groups.parts + groups.part] = entered - OUT  # zero elsewhere, so that sums are exact
        add_up(all_of_them, groups.control, HALTS[self._iteration])
        found = last_actions([int(number) + OUT for number in all_of_them.tolist()], groups.parts)
        return None if found is None else found[mine]

    def _decide(self, last: int | None) -> None:
        with self._changed:
            self._frozen, self._last = True, last
            self.decided.set()
            if last is not None and max(0, self._entered or 0) == last:
                self._cancel_token.cancel()


def drain(generation: Generation, iteration: int) -> bool:
    """Drain the attempt at ``iteration``, which all workers have opened; all members come here.

    Returns False, on all workers alike, if that cannot be done: new groups are needed then. Raises GenerationOver.
    """
    groups, transport = generation.groups, generation.transport
    plan = generation.program_of(iteration).plan
    pairs = sorted(channels(plan))
    begun = transport.begun()
    width, part = 2 * len(pairs), groups.part
    counts = torch.zeros(width * groups.parts + 1, dtype=torch.float64)
    own = [count for pair in pairs for count in begun.get(pair, (0, 0))]
    counts[part * width:(part + 1) * width] = torch.tensor(own)
    counts[-1] = not transport.can_drain
    add_up(counts, groups.control, DRAINS[iteration])
    *totals, unable = map(int, counts.tolist())
    if unable:
        return False
    found = totals[part * width:(part + 1) * width]
    transport.drain(plan, dict(zip(pairs, zip(found[::2], found[1::2], strict=True), strict=True)))
    for shared in list(generation.shared)[-1:]:
        shared.end()
    return True
