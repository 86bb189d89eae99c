"""A bundle of tensors and facts on its way from workers to a worker: the one way in which state travels.

Raw tensors and JSON travel, no pickle. A bundle's head is text: its facts, and the list of its tensors. The tensors,
laid end to end, are cut into pieces. Each giver sends an equal share of the pieces, followed by their CRC-32s.
Everything lands in buffers of its own, and counts once it is complete and verified: half a bundle is none.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from msgspec.structs import asdict

from megatron_recycle.errors import TransferError
from megatron_recycle.plan.value import Value
from megatron_recycle.runtime.comm.comm import Comm, Pending
from megatron_recycle.runtime.comm.tags import Tags

PIECE = 16 * 2**20
"""Bytes of a piece, which has one checksum."""
_SCALARS = (type(None), bool, int, float, str)
_SIZE, _TEXT, _SUMS, _FIRST_PIECE = range(4)


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
        """An empty tensor for it, on ``device`` if it is not in CPU memory."""
        return torch.empty(self.shape, dtype=getattr(torch, self.kind), device="cpu" if self.on_cpu else device)


class Head(Value, frozen=True):
    """The ``facts`` of a bundle, as `written`, and its tensors in their order."""

    facts: Any
    tensors: Sequence[Shape]

    @classmethod
    def of(cls, facts: Any, own: dict[str, torch.Tensor]) -> Head:
        """The head of ``facts``, which are made of numbers, text, None, lists, tuples, dicts, counters, values and
        tensors; the tensors are added to ``own``."""
        return cls(written(facts, own), [Shape.of(name, tensor) for name, tensor in own.items()])

    @property
    def text(self) -> str:
        return json.dumps(self.to_json())

    @classmethod
    def parse(cls, text: str) -> Head:
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


class Outgoing:
    """One giver's share of a bundle's ``tensors``; ``number``: of this giver among so many ``givers``."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], number: int = 0, givers: int = 1) -> None:
        flat = {name: bytes_of(tensor) for name, tensor in tensors.items()}
        cut = pieces({name: part.nbytes for name, part in flat.items()}, givers)
        self._parts = [flat[piece.name][piece.start:piece.stop] for piece in cut if piece.giver == number]

    def send(self, lane: Lane, to: int) -> list[Pending]:
        """Send the pieces."""
        return [lane.of(part).send(part, to, lane.tag(_FIRST_PIECE + number))
                for number, part in enumerate(self._parts)]

    def send_sums(self, lane: Lane, *takers: int) -> list[Pending]:
        """Send the checksums, which are computed while pieces travel."""
        sums = torch.tensor([*map(checksum, self._parts)] or [0])
        return [lane.control.send(sums, to, lane.tag(_SUMS)) for to in takers]


class Incoming:
    """A bundle on its way from ``givers``, ranks in the order of their numbers. Raises GenerationOver.

    Attributes:
        tensors: by name; not to be read before `finish`.
    """

    def __init__(self, lane: Lane, givers: Sequence[int], shapes: Sequence[Shape], device: torch.device) -> None:
        self._lane, self._givers = lane, givers
        self.tensors = {shape.name: shape.empty(device) for shape in shapes}
        flat = {name: bytes_of(tensor) for name, tensor in self.tensors.items()}
        cut = pieces({name: part.nbytes for name, part in flat.items()}, len(givers))
        self._shares = [[piece for piece in cut if piece.giver == number] for number in range(len(givers))]
        self._arriving: list[tuple[Span, Pending]] = []
        for giver, share in zip(givers, self._shares):
            for number, piece in enumerate(share):
                part = flat[piece.name][piece.start:piece.stop]
                self._arriving.append((piece, lane.of(part).receive(part, giver, lane.tag(_FIRST_PIECE + number))))

    def finish(self, what: str) -> dict[str, torch.Tensor]:
        """The tensors, once all are there. Raises TransferError, which calls the damaged bundle ``what``."""
        found = []
        for piece, pending in self._arriving:
            pending.wait()
            found.append((piece.name, checksum(pending.tensor)))
        sent: list[int] = []
        for giver, share in zip(self._givers, self._shares):
            sums = torch.zeros(max(1, len(share)), dtype=torch.int64)
            self._lane.control.receive(sums, giver, self._lane.tag(_SUMS)).wait()
            sent += sums.tolist()[:len(share)]
        wrong = sorted({name for (name, own), theirs in zip(found, sent, strict=True) if own != theirs})
        if wrong:
            raise TransferError(f"{what} arrived damaged ({', '.join(wrong[:5])}): its checksums differ from the "
                                "sender's. Check the network and this host's memory")
        return self.tensors


@dataclass(frozen=True)
class Lane:
    """The communicators and tags of one bundle.

    Attributes:
        control: for text, and tensors in CPU memory.
        bulk: for tensors on a device.
        tags: the bundle uses those from ``first`` on: three, and one for each piece of a share.
    """

    control: Comm
    bulk: Comm
    tags: Tags
    first: int = 0

    def tag(self, number: int) -> int:
        return self.tags[self.first + number]

    def of(self, part: torch.Tensor) -> Comm:
        """The communicator for this piece."""
        return self.control if part.device.type == "cpu" else self.bulk

    def send_head(self, text: str, to: int) -> list[Pending]:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return [self.control.send(torch.tensor([data.numel()]), to, self.tag(_SIZE)),
                self.control.send(data, to, self.tag(_TEXT))]

    def receive_head(self, source: int) -> str:
        """Wait for the text of a `Head`. Raises GenerationOver."""
        size = torch.zeros(1, dtype=torch.int64)
        self.control.receive(size, source, self.tag(_SIZE)).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self.control.receive(data, source, self.tag(_TEXT)).wait()
        return data.numpy().tobytes().decode()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as (nbytes,) uint8; a copy if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(part: torch.Tensor) -> int:
    """CRC-32 of a tensor of bytes."""
    return zlib.crc32(part.cpu().numpy())


def written(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` for JSON; tensors in it are added to ``tensors``. `read` gives it back, equal and of the same types,
    but for a `Value`, which becomes the dict of its fields."""
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
    # A giver must not fail: the taker finds this, and refuses.
    return ["unknown", f"{type(value).__module__}.{type(value).__qualname__}"]


def read(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The inverse of `written`; takes the value's tensors out of ``tensors``. Raises TransferError."""
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
