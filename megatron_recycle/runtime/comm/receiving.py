"""The receiving half of a worker's channels: receives posted ahead, and arrived messages."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_recycle.plan import AHEAD, Worker
from megatron_recycle.runtime.comm.comm import Pending, wait_all
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.messages import HEADER_SIZE, Chunks, Message, Meta, boundary, decode_header, wire
from megatron_recycle.runtime.comm.sending import Sender
from megatron_recycle.runtime.comm.tags import ACTIVATIONS
from megatron_recycle.runtime.compute.transfer_times import Lags


@dataclass
class _Channel:
    """Receiving end of a channel: messages expected, posted and arrived. ``metas``: shapes of its activations, and
    ``gradients``: of gradients that come before their forwards, both by the boundary that they cross. ``header``: the
    pending header of the next message."""

    expected: tuple[Message, ...]
    header: Pending | None = None
    metas: dict[int, Meta] = field(default_factory=dict)
    gradients: dict[int, Meta] = field(default_factory=dict)
    posted: int = 0
    pending: dict[Message, tuple[list[Pending], list[torch.Tensor]]] = field(default_factory=dict)
    number: int = 0


class Receiver:
    """The receiving ends of one worker's channels in one generation.

    Args:
        groups: the generation's handles.
        device: where received tensors live.
        lags: records the time of every message.
        sender: of the same worker: received gradients have the shapes of its activations.
    """

    def __init__(self, groups: Groups, device: torch.device, lags: Lags, sender: Sender) -> None:
        self._groups, self._device, self._lags, self._sender = groups, device, lags, sender
        self._channels: dict[Worker, _Channel] = {}
        self._chunks: Chunks = ()
        self._first: Collection[Message] = ()
        self._places: dict[Message, tuple[Worker, int]] = {}
        """The sender of each message, and the message's position on that channel."""
        self._to_read: dict[str, list[tuple[Worker, int]]] = {"F": [], "B": []}
        self._read = {"F": 0, "B": 0}

    def use(self, channels: Mapping[Worker, Sequence[Message]], reads: Iterable[Message],
            chunks: Chunks = (), first: Collection[Message] = ()) -> None:
        """Adopt the messages of an iteration from each worker, in the order of sending, and ``reads``, the same in the
        order of reading; message numbers run on. ``first``: as `Sender.use`."""
        self._chunks, self._first = chunks, first
        # A pair without a channel now may have one again later: its numbers run on, but nothing is expected on it.
        self._channels = {source: replace(old, expected=(), posted=0, pending={})
                          for source, old in self._channels.items()}
        for source, messages in channels.items():
            self._channels.setdefault(source, _Channel(())).expected = tuple(messages)
        self._places = {message: (source, number) for source, messages in channels.items()
                        for number, message in enumerate(messages)}
        self._to_read, self._read = {"F": [], "B": []}, {"F": 0, "B": 0}
        for message in reads:
            self._to_read[message[0]].append(self._places[message])

    def begin(self) -> None:
        """A new iteration: every channel starts over."""
        self._read = {"F": 0, "B": 0}
        for channel in self._channels.values():
            channel.posted = 0
            channel.pending.clear()

    def forget_shapes(self) -> None:
        """The next activation of each channel is preceded by its shapes again."""
        for channel in self._channels.values():
            channel.metas, channel.gradients, channel.header = {}, {}, None

    def receive(self, message: Message) -> list[torch.Tensor]:
        """The tensors of ``message``; blocks until they have come. Raises GenerationOver."""
        source, number = self._places[message]
        channel = self._channels[source]
        if message not in channel.pending:
            self._post(source, channel, number + 1)
        coming, tensors = channel.pending[message]
        asked = time.monotonic()
        wait_all(coming)
        for tensor in tensors:
            self._groups.world.backend.arrived(tensor)
        del channel.pending[message]
        self._read[message[0]] += 1
        if self._groups.world.backend.host:  # elsewhere the thread is ahead of the device
            self._lags.received(message, asked, time.monotonic())
        return tensors

    def post_next(self) -> None:
        """Keep receives posted for the next activations and gradients to be read, where their shapes are known."""
        for kind, row in self._to_read.items():
            for source, number in row[self._read[kind]:self._read[kind] + AHEAD]:
                self._post(source, self._channels[source], number + 1, wait=False)

    def post(self, message: Message) -> None:
        """Post the receives of ``message`` and of those before it on its channel. Raises GenerationOver."""
        source, number = self._places[message]
        self._post(source, self._channels[source], number + 1)

    # ---- an iteration that is void

    def begun(self) -> dict[Worker, int]:
        """The number of transfers begun on each channel, in all iterations."""
        return {source: channel.number for source, channel in self._channels.items()}

    def due(self, source: Worker, upto: int) -> Message | None:
        """The next message from ``source``, if fewer than ``upto`` transfers from it have begun, or if only its header
        has: the sender sends both together."""
        channel = self._channels[source]
        return channel.expected[channel.posted] if channel.number < upto or channel.header is not None else None

    def end(self) -> None:
        """Wait for all pending receives, and drop their tensors. Raises GenerationOver."""
        for channel in self._channels.values():
            for coming, _ in channel.pending.values():
                wait_all(coming)
            channel.pending = {}

    @property
    def of_gradients(self) -> Mapping[int, Meta]:
        """dtype and shape of the gradients of this worker's received activations, by the boundary crossed."""
        return {at: _with_gradient(meta) for channel in self._channels.values() for at, meta in channel.metas.items()}

    # ---- incoming messages

    def _post(self, source: Worker, channel: _Channel, upto: int, wait: bool = True) -> None:
        while channel.posted < upto:
            message = channel.expected[channel.posted]
            meta = self._meta(source, channel, message, wait)
            if meta is None:
                assert not wait
                return
            with self._groups.world.backend.ahead():
                tensors = [torch.empty(shape, dtype=dtype, device=self._device) for dtype, shape in meta]
                channel.pending[message] = [self._start(source, channel, wire(tensor)) for tensor in tensors], tensors
            channel.posted += 1

    def _meta(self, source: Worker, channel: _Channel, message: Message, wait: bool) -> Meta | None:
        """Shapes of ``message``, the channel's next one. An activation's come in its header; a gradient's are known,
        unless it may come before its forward."""
        at = boundary(self._chunks, self._groups.me, message)
        if message.kind == "B" and message not in self._first:
            sent = self._sender.metas.get(at)
            return None if sent is None else _with_gradient(sent)
        known = channel.metas if message.kind == "F" else channel.gradients
        if at not in known:
            if channel.header is None:
                with self._groups.world.backend.ahead():
                    header = torch.empty(HEADER_SIZE, dtype=torch.int64, device=self._device)
                    channel.header = self._start(source, channel, header)
            if wait or channel.header.done():
                channel.header.wait()
                self._groups.world.backend.arrived(channel.header.tensor)
                known[at], channel.header = decode_header(channel.header.tensor), None
        return known.get(at)

    def _start(self, source: Worker, channel: _Channel, tensor: torch.Tensor) -> Pending:
        channel.number += 1
        return self._groups.world.receive(tensor, self._groups.rank(source), ACTIVATIONS[channel.number - 1])


def _with_gradient(meta: Meta) -> Meta:
    """The tensors of a message that have a gradient."""
    return tuple(item for item in meta if item[0].is_floating_point)
