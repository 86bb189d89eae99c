"""Activations and gradients between workers, in the order the plan fixes.

One channel per direction of a pair of workers. A sender's listed actions fix the order of its messages
on each channel; the receiver posts its receives in that same order, so that nothing depends on tags (NCCL has
none, and an order that only tags made possible would deadlock there). It posts them for what it reads next, not for
every channel, so that a worker with guests has no more of them than another (`plan.receives`). On gloo the running
number of a message is its tag as well, which turns a lost message into a visible wait.

Where a library runs a communicator's operations one after the other (NCCL), nothing is posted ahead: all workers post
in one order, the plan's (`plan.transfers`), in which no plan can deadlock.

Shapes: a channel's first activation of a generation is preceded by a header that tells them; later ones
are of the same shapes. Gradients have the shapes of what the receiver itself sent.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.plan import AHEAD, Plan, Transfer, Worker, channels, postings, read_by, reads, transfers
from megatron_recycle.runtime.comm.comm import Pending
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.tags import ACTIVATIONS
from megatron_recycle.runtime.compute.transfer_times import Label, Lags

Message = tuple[str, int, int]
"""("F" | "B", pipeline, micro-batch): an activation going down or a gradient coming up."""

Meta = tuple[tuple[torch.dtype, tuple[int, ...]], ...]
"""dtype and shape of each tensor of a message."""

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16,
           torch.int32, torch.int64, torch.bool)
_HEADER_SIZE = 128


def meta_of(tensors: Sequence[torch.Tensor]) -> Meta:
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)


def encode_header(meta: Meta) -> torch.Tensor:
    """``meta`` as an int64 tensor of fixed size."""
    numbers = [len(meta)]
    for dtype, shape in meta:
        numbers += [_DTYPES.index(dtype), len(shape), *shape]
    if len(numbers) > _HEADER_SIZE:
        raise UnsupportedError(f"a stage boundary of {len(meta)} tensors is too large to announce; "
                               "pass fewer tensors between layers")
    return torch.tensor(numbers + [0] * (_HEADER_SIZE - len(numbers)), dtype=torch.int64)


def decode_header(header: torch.Tensor) -> Meta:
    numbers = deque(header.tolist())
    return tuple((_DTYPES[numbers.popleft()], tuple(numbers.popleft() for _ in range(numbers.popleft())))
                 for _ in range(numbers.popleft()))


@dataclass
class _Inbound:
    """Receiving end of a channel: what is expected, what is posted, what has arrived."""

    expected: tuple[Message, ...]
    header: Pending | None = None
    meta: Meta | None = None
    posted: int = 0
    pending: dict[Message, tuple[list[Pending], list[torch.Tensor]]] = field(default_factory=dict)
    number: int = 0


@dataclass
class _Outbound:
    expected: tuple[Message, ...]
    announced: bool = False
    sent: int = 0
    number: int = 0


class Transport:
    """All channels of one worker in one generation.

    Args:
        groups: the generation's handles.
        device: where received tensors live.
    """

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._groups = groups
        self._device = device
        # A send that is let go of before it has ended is lost, and gloo says that it has to nobody who does not wait.
        self._sending: dict[Message, list[Pending]] = {}
        self._before: list[Pending] = []
        self._inbound: dict[Worker, _Inbound] = {}
        self._outbound: dict[Worker, _Outbound] = {}
        self._source: dict[Message, Worker] = {}
        self._target: dict[Message, Worker] = {}
        self._sent_meta: Meta | None = None
        self._read_by: Mapping[Any, Sequence[Message]] = {}
        self._to_read: dict[str, list[tuple[Worker, int]]] = {"F": [], "B": []}
        self._read = {"F": 0, "B": 0}
        self._order: tuple[tuple[Worker, int] | None, ...] = ()
        self._place: dict[Message, int] = {}
        self._posted = 0
        self._followed: tuple[Plan, str] | None = None
        self.lags = Lags()

    def follow(self, plan: Plan, kinds: str = "FB") -> None:
        """Adopt the transfers of ``plan``, between two iterations, unless they are in use: those of ``kinds``,
        activations and gradients."""
        if self._followed is not None and self._followed[0] is plan and self._followed[1] == kinds:
            return
        self._followed = plan, kinds
        me = self._groups.me
        self.use({pair: kept for pair, messages in channels(plan).items()
                  if (kept := [message for message in messages if message.kind in kinds])},
                 [read for read in reads(plan, me) if read[1].kind in kinds],
                 read_by(plan, me) if kinds == "FB" else None)
        if self._groups.world.backend.ordered:
            self._post_in_order([each for each in postings(transfers(plan), me) if each.message.kind in kinds])

    def use(self, channels: Mapping[tuple[Worker, Worker], Sequence[Message]],
            reads: Iterable[tuple[Worker, Message]], read_by: Mapping[Any, Sequence[Message]] | None = None) -> None:
        """Adopt another plan's channels, between two iterations; message numbers run on.

        Args:
            channels: for every ordered pair of workers the messages of one iteration, in the sender's order
                (``plan.channels``); pairs without this worker are ignored.
            reads: what this worker reads, with its sender, in the order of its actions (``plan.reads``).
            read_by: which gradients have been read once an activation has come (``plan.read_by``): they are not kept
                any longer.
        """
        self._read_by = read_by or {}
        self._to_read, self._read = {"F": [], "B": []}, {"F": 0, "B": 0}
        self._order, self._place = (), {}
        me = self._groups.me
        self._source, self._target = {}, {}
        inbound, outbound = {}, {}
        for (source, target), messages in channels.items():
            if target == me:
                old = self._inbound.get(source, _Inbound(()))
                inbound[source] = _Inbound(tuple(messages), meta=old.meta, number=old.number)
                self._source.update(dict.fromkeys(messages, source))
            elif source == me:
                was = self._outbound.get(target, _Outbound(()))
                outbound[target] = _Outbound(tuple(messages), announced=was.announced, number=was.number)
                self._target.update(dict.fromkeys(messages, target))
        numbers = {source: {message: number for number, message in enumerate(channel.expected)}
                   for source, channel in inbound.items()}
        for source, message in reads:
            self._to_read[message[0]].append((source, numbers[source][message]))
        # A pair without a channel now may have one again later: its numbers run on, but nothing is expected on it.
        self._inbound = {**{source: _Inbound((), meta=old.meta, number=old.number)
                            for source, old in self._inbound.items()}, **inbound}
        self._outbound = {**{target: _Outbound((), announced=was.announced, number=was.number)
                             for target, was in self._outbound.items()}, **outbound}

    def _post_in_order(self, order: Sequence[Transfer]) -> None:
        """From now on receives are posted as they come in ``order``, this worker's transfers of an iteration."""
        numbers = {source: {message: number for number, message in enumerate(channel.expected)}
                   for source, channel in self._inbound.items()}
        self._order = tuple((source, numbers[source][message]) if source in numbers and message in numbers[source]
                            else None for source, _, message in order)
        self._place = {message: place for place, (_, _, message) in enumerate(order)}

    def begin(self, label: Label | None = None) -> None:
        """A new iteration: every channel starts over, and its first receives are posted.

        ``label`` is iteration and attempt, if the times of its messages are of interest.

        Nobody begins one before the last but one is committed: what was sent in that has been read.
        """
        self.lags.begin(label)
        self._let_go(self._before)
        self._before = [send for sends in self._sending.values() for send in sends]
        self._sending = {}
        self._read = {"F": 0, "B": 0}
        self._posted = 0
        for channel in self._inbound.values():
            channel.posted = 0
            channel.pending.clear()
        for outgoing in self._outbound.values():
            outgoing.sent = 0
        self.post()

    def send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Start sending ``tensors``; never waits for the receiver."""
        target = self._target[message]
        channel = self._outbound[target]
        expected = channel.expected[channel.sent]
        if expected != message:
            raise AssertionError(f"{self._groups.me} sends {message} to {target}, the plan has {expected} next")
        channel.sent += 1
        self._post_before(message)
        payload = [tensor.detach().contiguous() for tensor in tensors]
        if message[0] == "F":
            meta = meta_of(payload)
            if self._sent_meta not in (None, meta):
                raise UnsupportedError(
                    f"worker {self._groups.me} has {_shapes(meta)} to send after {_shapes(self._sent_meta)}; "
                    "all micro-batches must have the same shapes: pad them, and if a dataset's last micro-batch is "
                    "smaller, drop it (DeepSpeed: \"dataloader_drop_last\": true)")
            self._sent_meta = meta
            if not channel.announced:
                channel.announced = True
                payload = [encode_header(meta).to(self._device), *payload]
        self.lags.sent(message, time.monotonic())
        self._sending[message] = [self._start_send(target, channel, _wire(tensor)) for tensor in payload]

    def receive(self, message: Message) -> list[torch.Tensor]:
        """The tensors of ``message``, waiting for them if need be.

        Raises GenerationOver when the generation ends while waiting.
        """
        channel = self._inbound[self._source[message]]
        self._post_before(message)
        if message not in channel.pending:
            self._post(self._source[message], channel, channel.expected.index(message) + 1)
        coming, tensors = channel.pending.pop(message)
        self._read[message[0]] += 1
        asked = time.monotonic()
        for pending in coming:
            pending.wait()
        if self._groups.world.backend.host:  # elsewhere the thread is ahead of the device
            self.lags.received(message, asked, time.monotonic())
        kind, pipeline, microbatch = message
        if kind == "B":  # of an activation that has been read, then
            self._let_go(self._sending.pop(("F", pipeline, microbatch), []))
        for gradient in self._read_by.get(message, ()):
            self._let_go(self._sending.pop(gradient, []))
        return tensors

    def post(self) -> None:
        """Keep receives posted for the activations and gradients that are read next, where their shapes are known."""
        if self._order:
            return
        for kind, row in self._to_read.items():
            for source, number in row[self._read[kind]:self._read[kind] + AHEAD]:
                channel = self._inbound[source]
                if channel.posted <= number and self._meta(source, channel, wait=False) is not None:
                    self._post(source, channel, number + 1)

    def _post_before(self, message: Message) -> None:
        """Where transfers have an order: post the receives that come in it before ``message``."""
        upto = self._place.get(message, 0)
        for receive in self._order[self._posted:upto]:
            if receive is not None:
                source, number = receive
                self._post(source, self._inbound[source], number + 1)
        self._posted = max(self._posted, upto)

    def _let_go(self, sends: Sequence[Pending]) -> None:
        """Forget ``sends`` that have been read."""
        for pending in sends:
            pending.wait(read=True)

    def _start_send(self, target: Worker, channel: _Outbound, tensor: torch.Tensor) -> Pending:
        channel.number += 1
        return self._groups.world.send(tensor, self._groups.rank(target), ACTIVATIONS[channel.number - 1])

    def _start_receive(self, source: Worker, channel: _Inbound, tensor: torch.Tensor) -> Pending:
        channel.number += 1
        return self._groups.world.receive(tensor, self._groups.rank(source), ACTIVATIONS[channel.number - 1])

    def _post(self, source: Worker, channel: _Inbound, upto: int) -> None:
        while channel.posted < upto:
            message = channel.expected[channel.posted]
            meta = self._meta(source, channel, wait=True)
            assert meta is not None
            tensors = [torch.empty(shape, dtype=dtype, device=self._device) for dtype, shape in meta]
            channel.pending[message] = (
                [self._start_receive(source, channel, _wire(tensor)) for tensor in tensors], tensors)
            channel.posted += 1

    def _meta(self, source: Worker, channel: _Inbound, *, wait: bool) -> Meta | None:
        """Shapes of the channel's messages; for activations told by its header, for gradients known."""
        if channel.meta is None and channel.expected[0][0] == "B":
            if self._sent_meta is not None:
                channel.meta = tuple(item for item in self._sent_meta if item[0].is_floating_point)
        elif channel.meta is None:
            if channel.header is None:
                header = torch.empty(_HEADER_SIZE, dtype=torch.int64, device=self._device)
                channel.header = self._start_receive(source, channel, header)
            if wait or channel.header.done():
                channel.header.wait()
                channel.meta = decode_header(channel.header.tensor)
        return channel.meta


def _shapes(meta: Meta | None) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in meta or ())


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that every backend can move."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
