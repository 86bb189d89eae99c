"""The sending half of a worker's channels.

A send whose handle is dropped before it has ended is lost, and gloo reports completion only to waiters. So every send
is kept until its message is known to have been read, or until the iteration after the next begins.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.comm.comm import Pending, wait_all
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.messages import (
    Chunks,
    Message,
    Meta,
    boundary,
    encode_header,
    in_words,
    meta_of,
    wire,
)
from megatron_recycle.runtime.comm.tags import ACTIVATIONS
from megatron_recycle.runtime.compute.transfer_times import Lags


@dataclass
class _Channel:
    """Sending end of a channel: the expected messages, the kinds and boundaries whose shapes have been announced, and
    the number of messages sent."""

    expected: tuple[Message, ...]
    announced: set[tuple[str, int]] = field(default_factory=set)
    sent: int = 0
    number: int = 0


class Sender:
    """The sending ends of one worker's channels in one generation.

    Args:
        groups: the generation's handles.
        device: where tensors live.
        lags: records the time of every message.

    Attributes:
        metas: shapes of the activations that this worker has sent, by the boundary that they cross.
    """

    def __init__(self, groups: Groups, device: torch.device, lags: Lags) -> None:
        self.metas: dict[int, Meta] = {}
        self._chunks: Chunks = ()
        self._first: Collection[Message] = ()
        self._groups, self._device, self._lags = groups, device, lags
        self._channels: dict[Worker, _Channel] = {}
        self._targets: dict[Message, Worker] = {}
        self._unread: dict[Message, list[Pending]] = {}
        self._before: list[Pending] = []

    def use(self, channels: Mapping[Worker, Sequence[Message]], chunks: Chunks = (),
            first: Collection[Message] = ()) -> None:
        """Adopt the messages of an iteration to each worker, in the order of sending; message numbers run on.
        ``first``: gradients that may come before their forwards, so that their readers cannot know their shapes."""
        self._chunks, self._first = chunks, first
        # A pair without a channel now may have one again later: its numbers run on, but nothing is expected on it.
        self._channels = {target: _Channel((), announced=was.announced, number=was.number)
                          for target, was in self._channels.items()}
        self._targets = {}
        for target, messages in channels.items():
            self._channels.setdefault(target, _Channel(())).expected = tuple(messages)
            self._targets.update(dict.fromkeys(messages, target))

    def begin(self) -> None:
        """A new iteration: every channel starts over; the messages of the last but one have been read."""
        _let_go(self._before)
        self._before = [send for sends in self._unread.values() for send in sends]
        self._unread = {}
        for channel in self._channels.values():
            channel.sent = 0

    def forget_shapes(self) -> None:
        """The next activation of each channel is preceded by its shapes again."""
        self.metas = {}
        for channel in self._channels.values():
            channel.announced = set()

    def target(self, message: Message) -> Worker:
        """The receiver of ``message``, which must be the next one on its channel."""
        target = self._targets[message]
        channel = self._channels[target]
        expected = channel.expected[channel.sent]
        if expected != message:
            raise AssertionError(f"{self._groups.me} sends {message} to {target}, the plan has {expected} next")
        return target

    def note(self, target: Worker, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Record the shapes of a message that ``target`` has had already. Raises UnsupportedError as `send`."""
        if message[0] == "F":
            self._meta(target, message, tensors)

    def _meta(self, target: Worker, message: Message, tensors: Sequence[torch.Tensor]) -> tuple[int, Meta]:
        """The boundary that an activation crosses, and its shapes, the same for all activations over it."""
        meta, at = meta_of(tensors), boundary(self._chunks, target, message)
        before = self.metas.setdefault(at, meta)
        if before != meta:
            raise UnsupportedError(
                f"worker {self._groups.me} has {in_words(meta)} to send after {in_words(before)}; "
                "all micro-batches must have the same shapes: pad them, and if a dataset's last micro-batch is "
                "smaller, drop it (DeepSpeed: \"dataloader_drop_last\": true). Between iterations they may change: "
                "call engine.reset_activation_shape() on all ranks before")
        return at, meta

    def send(self, message: Message, target: Worker, tensors: Sequence[torch.Tensor]) -> None:
        """Start sending ``tensors`` to ``target``; never waits for it."""
        channel = self._channels[target]
        channel.sent += 1
        payload = [tensor.detach().contiguous() for tensor in tensors]
        if message.kind == "F" or message in self._first:
            at, meta = (self._meta(target, message, payload) if message.kind == "F"
                        else (boundary(self._chunks, target, message), meta_of(payload)))
            if (message.kind, at) not in channel.announced:
                channel.announced.add((message.kind, at))
                payload = [encode_header(meta).to(self._device), *payload]
        self._lags.sent(message, time.monotonic())
        self._unread[message] = [self._start(target, channel, wire(tensor)) for tensor in payload]

    # ---- an iteration that is void

    def begun(self) -> dict[Worker, int]:
        """The number of transfers begun on each channel, in all iterations."""
        return {target: channel.number for target, channel in self._channels.items()}

    def can_fill(self, of_gradients: Mapping[int, Meta]) -> bool:
        """Whether this worker knows the shapes of all messages that it sends; ``of_gradients``: shapes of gradients, by
        the boundary."""
        return all(boundary(self._chunks, target, message) in (self.metas if message.kind == "F" else of_gradients)
                   for target, channel in self._channels.items() for message in channel.expected)

    def due(self, target: Worker, upto: int) -> Message | None:
        """The next message to ``target``, if fewer than ``upto`` transfers to it have begun."""
        channel = self._channels[target]
        return channel.expected[channel.sent] if channel.number < upto else None

    def fill(self, message: Message, of_gradients: Mapping[int, Meta]) -> None:
        """Send a placeholder for ``message``, which its receiver waits for and drops."""
        target = self.target(message)
        meta = (self.metas if message.kind == "F" else of_gradients)[boundary(self._chunks, target, message)]
        self.send(message, target, [torch.empty(shape, dtype=dtype, device=self._device) for dtype, shape in meta])

    def end(self) -> None:
        """Wait until all sends of this iteration have been read. Raises GenerationOver."""
        wait_all([pending for sends in self._unread.values() for pending in sends])
        self._unread = {}

    # ---- messages that have been read

    def read(self, messages: Iterable[Message]) -> None:
        """``messages`` have been read, as far as they have been sent: drop them."""
        for message in messages:
            _let_go(self._unread.pop(message, ()))

    def _start(self, target: Worker, channel: _Channel, tensor: torch.Tensor) -> Pending:
        channel.number += 1
        return self._groups.world.send(tensor, self._groups.rank(target), ACTIVATIONS[channel.number - 1])


def _let_go(sends: Iterable[Pending]) -> None:
    """Drop ``sends`` that have been read."""
    for pending in sends:
        pending.wait(read=True)
