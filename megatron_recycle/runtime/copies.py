"""Copies of a stage's whole state in a worker's own memory: their content, their transfer, and which are kept.

A copy is text and tensors in CPU memory, the head and the tensors of a `bundle`; it shares no memory with
training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_recycle.membership.report import GuardReport
from megatron_recycle.membership.resume import CHECKPOINTS
from megatron_recycle.runtime.bundle import Head, Incoming, Lane, Outgoing, read
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.tags import GUARD

_CPU = torch.device("cpu")
_KEPT = 2
"""Copies kept of one stage: all workers still have the previous one while some make the next."""


@dataclass(frozen=True)
class StateCopy:
    """A stage's state between two iterations. `text` describes the tensors, and holds all other state."""

    text: str
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], facts: Any) -> StateCopy:
        """A copy of ``tensors``, and of facts as `Head.of` takes them."""
        own = {**tensors}
        text = Head.of(facts, own).text
        return cls(text, {name: tensor.detach().cpu().contiguous().clone() for name, tensor in own.items()})

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def open(self, device: torch.device) -> tuple[dict[str, torch.Tensor], Any]:
        """The tensors, each on its device, and the facts; the copy is not used up. Raises TransferError."""
        head = Head.parse(self.text)
        tensors = {shape.name: self.tensors[shape.name].to("cpu" if shape.on_cpu else device, copy=True)
                   for shape in head.tensors}
        return tensors, read(head.facts, tensors)


def send(comm: Comm, to: int, copy: StateCopy) -> None:
    """Send a copy to rank ``to`` of ``comm``. Raises GenerationOver."""
    lane, share = Lane(comm, comm, GUARD), Outgoing(copy.tensors)
    for pending in [*lane.send_head(copy.text, to), *share.send(lane, to), *share.send_sums(lane, to)]:
        pending.wait()


def receive(comm: Comm, source: int) -> StateCopy:
    """Receive a copy from `send`. Raises GenerationOver, and TransferError if it arrives damaged."""
    lane = Lane(comm, comm, GUARD)
    text = lane.receive_head(source)
    return StateCopy(text, Incoming(lane, [source], Head.parse(text).tensors, _CPU).finish("a stage's state"))


class Guard:
    """The copies that a worker keeps.

    Attributes:
        own: copies of its own stage, by the iteration after which they were made.
        of: copies of other stages, by stage and iteration.
        saved: the iterations after which the latest checkpoints were written that training can go back to.
        watched: whether there may be a checkpoint that this worker does not know of.
        back: the iteration before which the script made its last edit: to go back further than to the end of the
            previous one would lose that.
        first: the first iteration of this generation that all workers begin.
        midway: all are on their way back to a checkpoint, and this worker does not know yet that they have arrived:
            its state may be half loaded.
    """

    def __init__(self) -> None:
        self.saved: tuple[int, ...] = ()
        self.watched = False
        self.back = -1
        self.midway = False
        self.first = 0
        self.own: dict[int, StateCopy] = {}
        self.of: dict[int, dict[int, StateCopy]] = {}
        self._made = (0, -1)
        self._voided = False

    def due(self, generation: int, iteration: int, every: int) -> bool:
        """Whether copies are made before ``iteration``: the first of a generation, and then each of ``every``."""
        return iteration >= self.first and (
            self._made[0] != generation or (iteration % every == 0 and self._made[1] != iteration))

    @property
    def begins(self) -> bool:
        """Whether no copy was ever kept."""
        return self._made == (0, -1)

    def keep(self, generation: int, iteration: int, own: StateCopy, of: Mapping[int, StateCopy]) -> None:
        """Keep the copies made before ``iteration``, and the previous ones."""
        self._made = generation, iteration
        self.own = _latest({**self.own, iteration - 1: own})
        self.of = {stage: _latest({**self.of.get(stage, {}), iteration - 1: copy}) for stage, copy in of.items()}

    def save(self, iteration: int) -> None:
        """A checkpoint of the state after ``iteration`` was written. It has the script's edits until then, if it is the
        first of that iteration."""
        if iteration not in self.saved:
            self.back = min(self.back, iteration)
        self.saved = (*self.saved, iteration)[-CHECKPOINTS:]

    def unsave(self, iteration: int) -> None:
        """The checkpoint of the state after ``iteration`` that was begun is given up."""
        self.saved = tuple(one for one in self.saved if one != iteration)

    def go_back(self, iteration: int) -> None:
        """Training goes on from the end of ``iteration``: drop later copies, which are made again, perhaps with other
        rounding."""
        self.own, self.of = _until(iteration, self.own), {stage: _until(iteration, of) for stage, of in self.of.items()}

    def forget(self) -> None:
        """Drop the copies, which are of no use any more; new ones are made when they are due."""
        self.own, self.of = {}, {}

    def void(self, stepped: int) -> bool:
        """Drop the copies, which the script's edits after iteration ``stepped`` have made wrong. Returns whether that
        is news: there were some, and it is the first time."""
        self.back = stepped + 1
        is_new, self._voided = bool(self.own) and not self._voided, self._voided or bool(self.own)
        self.forget()
        return is_new

    @property
    def returns(self) -> bool:
        """Whether training may go back to a state from before the script's present edits."""
        return self.watched or bool(self.saved or self.own)

    @property
    def oldest(self) -> int | None:
        """The earliest iteration after which training can go on; None: it never goes back."""
        return min((*self.own, *self.saved), default=None)

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copies in (self.own, *self.of.values()) for copy in copies.values())

    def report(self, back: int | None, read: int) -> GuardReport:
        """The report for the coordinator; for the arguments see `GuardReport`."""
        of = {stage: tuple(sorted(copies)) for stage, copies in self.of.items()}
        return GuardReport(tuple(sorted(self.own)), of, back, read, self.midway)


def _latest(copies: Mapping[int, StateCopy]) -> dict[int, StateCopy]:
    return {iteration: copies[iteration] for iteration in sorted(copies)[-_KEPT:]}


def _until(last: int, copies: Mapping[int, StateCopy]) -> dict[int, StateCopy]:
    return {iteration: copy for iteration, copy in copies.items() if iteration <= last}
