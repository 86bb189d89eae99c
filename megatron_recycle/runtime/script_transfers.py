"""The script's messages from one rank to another between two iterations, through failures.

Messages of a pair are numbered, on both ends alike. A failure voids all transfers under way. Receivers then report the
messages that they have, and senders send all others again. For that each process keeps its latest messages. Transfers
with a lost rank cannot be made again: its partners get an error that names it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import torch

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.comm.comm import Pending
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.tags import CONTROL
from megatron_recycle.runtime.comm.user_collectives.exchange import Group
from megatron_recycle.runtime.comm.user_collectives.packing import rows_of_all
from megatron_recycle.runtime.place import Place

SENT = CONTROL.take("what the script sends", 2**26, again=True)
"""Tags by message, and by the groups that it travels on: no older message is taken for it."""
_MOST = 64 * 2**20
"""Limit to the bytes of sent messages that are kept."""


@dataclass(eq=False)
class Message:
    """A tensor that the script sends, or receives.

    Attributes:
        pair: its group, the script's tag, sender and receiver.
        number: of it in its pair, from 1.
        peer: rank of the other end.
        data: the tensor to send, or room for the tensor to receive, in CPU memory.
        into: the script's tensor to receive into; None: it is sent.
        pending: its transfer, if that has begun on the groups in force.
        done: whether it has been received, or sent.
        lost: why it never will be.
        once: whether it is given up with the generation.
    """

    pair: str
    number: int
    peer: int
    data: torch.Tensor
    into: torch.Tensor | None
    pending: Pending | None = None
    done: bool = False
    lost: str = ""
    once: bool = False

    @property
    def what(self) -> str:
        """torch's name of the call."""
        return "send" if self.into is None else "recv"

    @property
    def key(self) -> float:
        """The key of its pair, the same on both ends."""
        return _key(self.pair)


class Transfers:
    """One process's messages.

    Args:
        place: position, grid, ranks.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._begun = Counter[str]()
        """By pair: the number of this process's messages."""
        self._incoming: set[str] = set()
        """The pairs in which it receives."""
        self._kept: list[Message] = []
        """Messages under way, and the latest ones sent: their receivers may not have them."""

    def begin(self, group: Group, peer: int, tensor: torch.Tensor, tag: int, sends: bool,
              only: object = None) -> Message:
        """The script's next message, to or from position ``peer`` of ``group``, to be `post`ed. ``only``: the epoch
        with which it is given up; None: it never is."""
        me, other = group.ranks[group.me], group.ranks[peer]
        first, second = (me, other) if sends else (other, me)
        pair = f"{group.name}/{tag}/{first} to {second}" + (f"/{only}" if only else "")
        self._begun[pair] += 1
        if not sends and not only:
            self._incoming.add(pair)
        data = tensor.detach().cpu().contiguous().clone() if sends else torch.empty(tensor.shape, dtype=tensor.dtype)
        return Message(pair, self._begun[pair], other, data, None if sends else tensor, once=only is not None)

    def post(self, message: Message, groups: Groups, epoch: object) -> None:
        """Begin ``message`` on the groups of ``epoch``, unless it is under way, done or lost. Raises GenerationOver."""
        if message.pending is not None or message.done or message.lost:
            return
        if message not in self._kept and not message.once:
            self._kept.append(message)
        live_ranks = self._live_ranks(groups)
        if message.peer not in live_ranks:
            self._lose(message, "is gone")
            return
        tag = SENT[zlib.crc32(f"{message.pair}/{message.number}/{epoch}".encode())]
        start = groups.control.send if message.into is None else groups.control.receive
        message.pending = start(message.data, live_ranks.index(message.peer), tag)

    def arrive(self, message: Message, groups: Groups, epoch: object) -> None:
        """Wait until ``message`` has been received, or sent. Raises GenerationOver."""
        self.post(message, groups, epoch)
        if message.pending is None or message.done:
            return
        message.pending.wait()
        message.done = True
        if message.into is not None:
            self._forget(message)
            with torch.no_grad():
                message.into.copy_(message.data)
            return
        left = [sent for sent in self._kept if sent.done]
        while sum(sent.data.nbytes for sent in left) > _MOST:
            self._kept.remove(left.pop(0))

    def reconcile(self, groups: Groups, epoch: object, joined: Collection[int] = ()) -> None:
        """On new groups: find out which messages have arrived, and send the others again. ``joined``: processes that
        come in; messages with their predecessors are lost. Raises GenerationOver."""
        live_ranks = self._live_ranks(groups)
        stay = {rank for process, rank in enumerate(live_ranks) if process not in joined}
        comes = groups.control.rank in joined
        for message in [*self._kept]:
            message.pending = None
            if comes or message.peer not in stay:
                self._lose(message, "was out meanwhile" if message.peer in live_ranks else "is gone")
        receives = [message for message in self._kept if message.into is not None]
        had = rows_of_all(groups.control, [] if comes else [
            *((_key(pair), float(self._begun[pair])) for pair in sorted(self._incoming)),
            *((message.key, -float(message.number)) for message in receives)])
        wanted = {(key, -number) for key, number in had if number < 0}
        asked = {key: number for key, number in had if number > 0}
        for message in [*self._kept]:
            if message.into is None and message.number <= asked.get(message.key, 0) and (
                    message.key, message.number) not in wanted:
                message.done = True
                self._kept.remove(message)
        if wanted:
            self._find_lost(groups, wanted)
        for message in [*self._kept]:
            message.done = False  # it is under way again, even if it has been waited for
            self.post(message, groups, epoch)

    def _find_lost(self, groups: Groups, wanted: Collection[tuple[float, float]]) -> None:
        """Lose messages that are ``wanted`` but were sent too long ago to be sent again."""
        sent = {_key(pair): count for pair, count in self._begun.items() if pair not in self._incoming}
        kept = {(message.key, float(message.number)) for message in self._kept}
        gone = rows_of_all(groups.control, sorted(
            (key, number) for key, number in wanted if number <= sent.get(key, 0) and (key, number) not in kept))
        for message in [*self._kept]:
            if message.into is not None and (message.key, float(message.number)) in gone:
                self._lose(message, f"had sent more than {_MOST // 2**20} MiB since, when a failure cut it short")

    def _forget(self, message: Message) -> None:
        if not message.once:
            self._kept.remove(message)

    def _lose(self, message: Message, reason: str) -> None:
        self._forget(message)
        if not message.done:
            message.lost = (
                f"the script calls {message.what}() with rank {message.peer} (worker "
                f"{self._place.names[message.peer]}), which {reason}: nobody can take its part between two ranks. Use "
                "a collective, leave it out, or let the worker be started again (max_restarts)")

    def _live_ranks(self, groups: Groups) -> list[int]:
        """Ranks of all live processes."""
        return sorted(rank for worker in groups.members for rank in self._place.ranks[worker])


def raise_if_lost(message: Message) -> None:
    """Raises UnsupportedError if ``message`` will never come, or leave."""
    if message.lost:
        raise UnsupportedError(message.lost)


def _key(pair: str) -> float:
    return float(zlib.crc32(pair.encode()) + 1)
