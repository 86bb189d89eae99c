"""The copy of a stage's whole state, from its workers to one that comes in.

Raw tensors and JSON travel, no pickle. The stage's tensors, laid end to end, are cut into pieces; each giving peer
sends an equal share of them, and the CRC-32 of each piece after it. The first one sends what else there is: names,
shapes and counters. Everything lands in buffers of its own and is switched in when all of it is there and right; half a
copy is none.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from msgspec.structs import asdict

from megatron_recycle.errors import TransferError
from megatron_recycle.membership.inputs import Received
from megatron_recycle.plan import Worker
from megatron_recycle.plan.value import Read, Value
from megatron_recycle.runtime.comm.comm import Comm, Pending
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.tags import STATE_FACTS, STATE_PIECES, STATE_SUMS
from megatron_recycle.runtime.stage import Stage

PIECE = 16 * 2**20
"""Bytes that have one checksum."""
_SCALARS = (type(None), bool, int, float, str)


class Shape(NamedTuple):
    """A tensor's name, type and shape, and whether it is in CPU memory."""

    name: str
    kind: str
    shape: Sequence[int]
    on_cpu: bool

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Shape:
        return cls(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type == "cpu")

    def empty(self, device: torch.device) -> torch.Tensor:
        """Room for it, on ``device`` if it is not in CPU memory."""
        return torch.empty(self.shape, dtype=getattr(torch, self.kind), device="cpu" if self.on_cpu else device)


class Told(Value, frozen=True):
    """What travels as text: the ``facts``, as `written`, and which tensors there are."""

    facts: Any
    tensors: Sequence[Shape]

    @classmethod
    def of(cls, facts: Any, own: dict[str, torch.Tensor]) -> Told:
        """Tensors in ``facts`` go to ``own``."""
        return cls(written(facts, own), [Shape.of(name, tensor) for name, tensor in own.items()])

    @property
    def text(self) -> str:
        return json.dumps(self.to_json())

    @classmethod
    def parse(cls: type[Read], text: str | bytes) -> Read:
        return cls.from_json(json.loads(text))


@dataclass(frozen=True)
class Span:
    """Bytes ``start`` to ``stop`` of the tensor ``name``, sent by giver number ``giver``."""

    name: str
    start: int
    stop: int
    giver: int


def pieces(sizes: Mapping[str, int], givers: int, limit: int = PIECE) -> list[Span]:
    """Tensors of these ``sizes`` in bytes, cut into pieces of at most ``limit``, shared out evenly."""
    cuts = [(name, start, min(start + limit, size)) for name, size in sizes.items() for start in range(0, size, limit)]
    total, before, found = sum(sizes.values()), 0, []
    for name, start, stop in cuts:
        found.append(Span(name, start, stop, min(givers - 1, before * givers // max(1, total))))
        before += stop - start
    return found


def give(groups: Groups, joined: Sequence[Worker], tensors: Mapping[str, torch.Tensor], facts: Any) -> None:
    """Send all ``tensors`` and ``facts`` of this stage to those of ``joined`` that are of it.

    ``facts`` is anything made of numbers, text, None, lists, tuples, dicts, counters, tensors and values, which arrive
    as dicts.

    Raises:
        GenerationOver: a newer generation begins.
    """
    peers = groups.peers(groups.me.stage)
    takers = [worker for worker in peers if worker in joined]
    givers = [worker for worker in peers if worker not in joined]
    if not takers or groups.me not in givers:
        return
    own = {**tensors}
    told = Told.of(facts, own).text
    mine = [piece for piece in pieces({name: tensor.nbytes for name, tensor in own.items()}, len(givers))
            if givers[piece.giver] == groups.me]
    flat = {name: bytes_of(tensor) for name, tensor in own.items()}
    control = groups.stage_control
    moving: list[Pending] = []
    text = torch.frombuffer(bytearray(told.encode()), dtype=torch.uint8)
    size = torch.tensor([text.numel()])
    for taker in map(peers.index, takers):
        if givers[0] == groups.me:
            moving += [control.send(size, taker, STATE_FACTS[0]), control.send(text, taker, STATE_FACTS[1])]
        for number, piece in enumerate(mine):
            part = flat[piece.name][piece.start:piece.stop]
            moving.append(_comm(groups, part).send(part, taker, STATE_PIECES[number]))
    # While they travel.
    sums = torch.tensor([checksum(flat[piece.name][piece.start:piece.stop]) for piece in mine] or [0])
    moving += [control.send(sums, taker, STATE_SUMS[0]) for taker in map(peers.index, takers)]
    for pending in moving:
        pending.wait()


def take(groups: Groups, joined: Sequence[Worker],
         device: torch.device) -> tuple[dict[str, torch.Tensor], Any, Received]:
    """Receive what `give` sends, into new buffers.

    Returns:
        tensors, facts, and what it took.

    Raises:
        TransferError: what arrived is not what was sent.
        GenerationOver: a newer generation begins.
    """
    peers = groups.peers(groups.me.stage)
    givers = [peers.index(worker) for worker in peers if worker not in joined]
    control = groups.stage_control
    size = torch.zeros(1, dtype=torch.int64)
    control.receive(size, givers[0], STATE_FACTS[0]).wait()
    began = time.monotonic()
    text = torch.empty(int(size), dtype=torch.uint8)
    control.receive(text, givers[0], STATE_FACTS[1]).wait()
    told = Told.parse(text.numpy().tobytes())
    tensors = {shape.name: shape.empty(device) for shape in told.tensors}
    flat = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    cut = pieces({name: tensor.nbytes for name, tensor in tensors.items()}, len(givers))
    _receive(groups, givers, cut, flat)
    received = Received(sum(tensor.nbytes for tensor in tensors.values()), 1000 * (time.monotonic() - began))
    return tensors, read(told.facts, tensors), received


def _receive(groups: Groups, givers: Sequence[int], cut: Sequence[Span], flat: Mapping[str, torch.Tensor]) -> None:
    """All pieces from all givers, each compared with the giver's checksum of it."""
    shares = [[piece for piece in cut if piece.giver == number] for number in range(len(givers))]
    arriving = []
    for giver, share in zip(givers, shares):
        parts = [flat[piece.name][piece.start:piece.stop] for piece in share]
        arriving.append([_comm(groups, part).receive(part, giver, STATE_PIECES[number])
                         for number, part in enumerate(parts)])
    found = []
    for share, coming in zip(shares, arriving):
        for piece, pending in zip(share, coming):
            pending.wait()
            found.append((piece, checksum(pending.tensor)))
    sent = []
    for giver, share in zip(givers, shares):
        sums = torch.zeros(max(1, len(share)), dtype=torch.int64)
        groups.stage_control.receive(sums, giver, STATE_SUMS[0]).wait()
        sent += sums.tolist()[:len(share)]
    wrong = sorted({piece.name for (piece, own), theirs in zip(found, sent, strict=True) if own != theirs})
    if wrong:
        raise TransferError(f"the state of stage {groups.me.stage} arrived damaged ({', '.join(wrong[:5])}): its "
                            "checksums differ from the sender's. Start this worker again; if it comes back, check "
                            "the network and this host's memory")


def stage_tensors(stage: Stage) -> dict[str, torch.Tensor]:
    """Everything that a worker of this stage must have as its peers do."""
    return {**stage.state(), **stage.fixed()}


def _comm(groups: Groups, tensor: torch.Tensor) -> Comm:
    return groups.stage_control if tensor.device.type == "cpu" else groups.stage


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as (nbytes,) uint8; a copy if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(part: torch.Tensor) -> int:
    """CRC-32 of a tensor of bytes."""
    return zlib.crc32(part.cpu().numpy())


def written(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` for JSON; tensors in it go to ``tensors``. `read` gives it back, equal and of the same types; a
    value as the dict of its fields."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Value):
        return written(asdict(value), tensors)
    if isinstance(value, torch.Tensor):
        name = f"fact {len(tensors)}"
        tensors[name] = value
        return ["tensor", name]
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return [type(value).__name__, *(written(item, tensors) for item in value)]
    if type(value) in (dict, Counter):
        items = [[written(key, tensors), written(item, tensors)] for key, item in value.items()]
        return [type(value).__name__, *items]
    # A giver must not fail: the one that wants to come in is told, and refuses.
    return ["unknown", f"{type(value).__module__}.{type(value).__qualname__}"]


def read(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """What `written` was given; its tensors are taken out of ``tensors``. Raises TransferError."""
    if not isinstance(value, list):
        return value
    kind, *items = value
    if kind == "tensor":
        return tensors.pop(items[0])
    if kind == "unknown":
        raise TransferError(f"the job's counters (optimizer, schedule) hold a {items[0]}, which cannot be passed on: a "
                            "worker cannot come back to this job")
    if kind in ("dict", "Counter"):
        pairs = [(read(key, tensors), read(item, tensors)) for key, item in items]
        return dict(pairs) if kind == "dict" else Counter(dict(pairs))
    parts = [read(item, tensors) for item in items]
    return tuple(parts) if kind == "tuple" else parts
