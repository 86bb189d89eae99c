"""Copies of a stage's whole state in a worker's own memory: what they are, how they travel, and which are kept.

A copy is text and tensors in CPU memory, as `state_copy` describes a state to a worker that comes in; nothing that
trains shares memory with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_recycle.errors import TransferError
from megatron_recycle.membership.guarding import CHECKPOINTS
from megatron_recycle.membership.report import GuardReport
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.comm.tags import GUARD
from megatron_recycle.runtime.state_copy import Told, bytes_of, checksum, pieces, read

_SIZE, _TEXT, _SUMS, _FIRST_PIECE = GUARD[0], GUARD[1], GUARD[2], 3
_CPU = torch.device("cpu")
_KEPT = 2
"""Copies of one stage: all workers have the one before as long as some make the next."""


@dataclass(frozen=True)
class StateCopy:
    """A stage's state between two iterations. `text` says what the tensors are, and has all that is none."""

    text: str
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], facts: Any) -> StateCopy:
        """Of what `state_copy.give` takes."""
        own = {**tensors}
        text = Told.of(facts, own).text
        return cls(text, {name: tensor.detach().cpu().contiguous().clone() for name, tensor in own.items()})

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def open(self, device: torch.device) -> tuple[dict[str, torch.Tensor], Any]:
        """The tensors, each where it was, and the facts; the copy stays as it is. Raises TransferError."""
        told = Told.parse(self.text)
        tensors = {shape.name: self.tensors[shape.name].to("cpu" if shape.on_cpu else device, copy=True)
                   for shape in told.tensors}
        return tensors, read(told.facts, tensors)


def send(comm: Comm, to: int, copy: StateCopy) -> None:
    """Send a copy to rank ``to`` of ``comm``. Raises GenerationOver."""
    text = torch.frombuffer(bytearray(copy.text.encode()), dtype=torch.uint8)
    flat = {name: bytes_of(tensor) for name, tensor in copy.tensors.items()}
    cut = pieces({name: part.nbytes for name, part in flat.items()}, 1)
    moving = [comm.send(torch.tensor([text.numel()]), to, _SIZE), comm.send(text, to, _TEXT)]
    parts = [flat[piece.name][piece.start:piece.stop] for piece in cut]
    moving += [comm.send(part, to, GUARD[_FIRST_PIECE + number]) for number, part in enumerate(parts)]
    moving.append(comm.send(torch.tensor([*map(checksum, parts)] or [0]), to, _SUMS))
    for pending in moving:
        pending.wait()


def receive(comm: Comm, source: int) -> StateCopy:
    """Receive what `send` sends. Raises GenerationOver, and TransferError if it arrives damaged."""
    size = torch.zeros(1, dtype=torch.int64)
    comm.receive(size, source, _SIZE).wait()
    text = torch.empty(int(size), dtype=torch.uint8)
    comm.receive(text, source, _TEXT).wait()
    told = text.numpy().tobytes().decode()
    tensors = {shape.name: shape.empty(_CPU) for shape in Told.parse(told).tensors}
    flat = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    cut = pieces({name: part.nbytes for name, part in flat.items()}, 1)
    parts = [flat[piece.name][piece.start:piece.stop] for piece in cut]
    arriving = [comm.receive(part, source, GUARD[_FIRST_PIECE + number]) for number, part in enumerate(parts)]
    sums = torch.zeros(max(1, len(parts)), dtype=torch.int64)
    arriving.append(comm.receive(sums, source, _SUMS))
    for pending in arriving:
        pending.wait()
    if [checksum(part) for part in parts] != sums.tolist()[:len(parts)]:
        raise TransferError("a stage's state arrived damaged: its checksums differ from the sender's. Check the "
                            "network and this host's memory")
    return StateCopy(told, tensors)


class Guard:
    """The copies that a worker keeps.

    Attributes:
        own: of its own stage, by the iteration after which they were made.
        of: of other stages, by stage, likewise.
        saved: the iterations after which the latest checkpoints were written that training can go back to.
        watched: whether there may be one, of which this worker does not know.
        back: the script has changed something since the end of the iteration before this one: to go back further would
            lose that.
        midway: all are on their way back to a checkpoint, and this worker does not know that they have arrived.
    """

    def __init__(self) -> None:
        self.saved: tuple[int, ...] = ()
        self.watched = False
        self.back = -1
        self.midway = False
        self.own: dict[int, StateCopy] = {}
        self.of: dict[int, dict[int, StateCopy]] = {}
        self._made = (0, -1)
        self._voided = False

    def due(self, generation: int, iteration: int, every: int) -> bool:
        """Whether copies are made before ``iteration``: the first time in a generation, and before one of ``every``."""
        return self._made[0] != generation or (iteration % every == 0 and self._made[1] != iteration)

    @property
    def begins(self) -> bool:
        """Whether nothing was ever kept."""
        return self._made == (0, -1)

    def keep(self, generation: int, iteration: int, own: StateCopy, of: Mapping[int, StateCopy]) -> None:
        """Keep the copies made before ``iteration``, and those made before them."""
        self._made = generation, iteration
        self.own = _latest({**self.own, iteration - 1: own})
        self.of = {stage: _latest({**self.of.get(stage, {}), iteration - 1: copy}) for stage, copy in of.items()}

    def save(self, iteration: int) -> None:
        """A checkpoint of the state after ``iteration`` was written. What the script had changed by then is in it, if
        there was none of that iteration before."""
        if iteration not in self.saved:
            self.back = min(self.back, iteration)
        self.saved = (*self.saved, iteration)[-CHECKPOINTS:]

    def unsave(self, iteration: int) -> None:
        """The checkpoint of the state after ``iteration`` that was begun is given up."""
        self.saved = tuple(one for one in self.saved if one != iteration)

    def go_back(self, iteration: int) -> None:
        """Training goes on from the end of ``iteration``: what was copied after it is made again, perhaps with other
        rounding."""
        self.own, self.of = _until(iteration, self.own), {stage: _until(iteration, of) for stage, of in self.of.items()}

    def forget(self) -> None:
        """The copies are of no use any more; new ones are made when they are due."""
        self.own, self.of = {}, {}

    def void(self, stepped: int) -> bool:
        """What the script has changed after iteration ``stepped`` makes copies of before wrong from now on. Returns
        whether that is news: there were some, and it is the first time."""
        self.back = stepped + 1
        news, self._voided = bool(self.own) and not self._voided, self._voided or bool(self.own)
        self.forget()
        return news

    @property
    def returns(self) -> bool:
        """Whether training may go back to a state from before what the script does now."""
        return self.watched or bool(self.saved or self.own)

    @property
    def oldest(self) -> int | None:
        """The earliest iteration after which training can go on; None: it never goes back."""
        return min((*self.own, *self.saved), default=None)

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copies in (self.own, *self.of.values()) for copy in copies.values())

    def report(self, back: int | None, read: int) -> GuardReport:
        """What there is, for the coordinator; see there for the arguments."""
        of = {stage: tuple(sorted(copies)) for stage, copies in self.of.items()}
        return GuardReport(tuple(sorted(self.own)), of, back, read, self.midway)


def _latest(copies: Mapping[int, StateCopy]) -> dict[int, StateCopy]:
    return {iteration: copies[iteration] for iteration in sorted(copies)[-_KEPT:]}


def _until(last: int, copies: Mapping[int, StateCopy]) -> dict[int, StateCopy]:
    return {iteration: copy for iteration, copy in copies.items() if iteration <= last}
