"""Activations and gradients between workers, in the order the plan fixes.

One channel per direction of a pair of workers. The order of a sender's actions fixes the order of its messages on each
channel; the receiver posts its receives in that same order, so that nothing depends on tags (NCCL has none, and an
order that only tags made possible would deadlock there). Receives are posted for the next reads, not for every channel,
so that a worker with guests has no more of them than another (`plan.receives`). On gloo the running number of a message
is its tag as well, which turns a lost message into a visible wait.

Where a library runs a communicator's operations one after the other (NCCL), nothing is posted ahead: all workers post
in one order, the plan's (`plan.transfers`), in which no plan can deadlock.

Shapes: in each generation a header precedes a channel's first activation over each boundary between two chunks; later
ones have the same shapes. Gradients have the shapes of the receiver's own activations; a header also precedes those
that, after a failure, may come before these are sent once more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from megatron_recycle.plan import Plan, Transfer, Worker, channels, comes_first, postings, read_by, reads, transfers
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.messages import Chunks, Message, Meta
from megatron_recycle.runtime.comm.receiving import Receiver
from megatron_recycle.runtime.comm.sending import Sender
from megatron_recycle.runtime.compute.transfer_times import Label, Lags


class _Order:
    """One worker's transfers of an iteration in the order of posting, where a library needs one.

    Args:
        postings: of the worker, in order (``plan.postings``).
        me: the worker.
    """

    def __init__(self, postings: Sequence[Transfer], me: Worker) -> None:
        self._receives: list[Message] = []
        self._before: dict[tuple[Message, bool], int] = {}
        """The number of receives before each message that arrives, or (true) is sent: an arriving and a sent message
        may have the same name, and come at different times."""
        for source, target, message in postings:
            self._before[message, source == me] = len(self._receives)
            if target == me:
                self._receives.append(message)
        self._posted = 0

    def begin(self) -> None:
        """A new iteration: nothing is posted."""
        self._posted = 0

    def before(self, message: Message, sent: bool) -> list[Message]:
        """The receives, not yet returned, that come before ``message``, which is ``sent`` or arrives."""
        upto = self._before.get((message, sent), 0)
        due = self._receives[self._posted:upto]
        self._posted = max(self._posted, upto)
        return due


class Transport:
    """All channels of one worker in one generation.

    Args:
        groups: the generation's handles.
        device: where received tensors live.

    Attributes:
        lags: when messages left and came.
    """

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.lags = Lags()
        self._groups = groups
        self._sender = Sender(groups, device, self.lags)
        self._receiver = Receiver(groups, device, self.lags, self._sender)
        self._order: _Order | None = None
        self._read_by: Mapping[Message, Sequence[Message]] = {}
        self._followed: tuple[Plan, str] | None = None

    def follow(self, plan: Plan, kinds: str = "FB", read: Collection[tuple[Worker, Message]] = ()) -> None:
        """Adopt the transfers of ``plan``, between two iterations, unless they are in use: those of ``kinds``,
        activations and gradients, except those that their receivers have ``read`` in an earlier attempt."""
        if self._followed is not None and self._followed[0] is plan and self._followed[1] == kinds and not read:
            return
        self._followed = None if read else (plan, kinds)
        me = self._groups.me

        def wanted(by: Worker, message: Message) -> bool:
            return message[0] in kinds and (by, message) not in read

        self.use({pair: kept for pair, messages in channels(plan).items()
                  if (kept := [message for message in messages if wanted(pair[1], message)])},
                 [each for each in reads(plan, me) if wanted(me, each[1])],
                 read_by(plan, me) if kinds == "FB" else None, plan.problem.chunks_of,
                 lambda by, message: comes_first(plan, by, message))
        if self._groups.world.backend.ordered:
            self._order = _Order([each for each in postings(transfers(plan), me)
                                  if wanted(each.target, each.message)], me)

    @property
    def metas(self) -> Mapping[int, Meta]:
        """Shapes of the activations that this worker has sent, by the boundary that they cross."""
        return dict(self._sender.metas)

    def know(self, metas: Mapping[int, Meta]) -> None:
        """Restore the shapes of activations sent in an earlier generation, whose gradients are still to come."""
        self._sender.metas = dict(metas)

    def note(self, to: Worker, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """``message`` was recomputed for ``to``, which had read it before: its gradient has the same shapes."""
        self._sender.note(to, message, tensors)

    def use(self, channels: Mapping[tuple[Worker, Worker], Sequence[Message]],
            reads: Iterable[tuple[Worker, Message]],
            read_by: Mapping[Message, Sequence[Message]] | None = None, chunks: Chunks = (),
            first: Callable[[Worker, Message], bool] = lambda by, message: False) -> None:
        """Adopt another plan's channels, between two iterations; message numbers run on.

        Args:
            channels: for every ordered pair of workers the messages of one iteration, in the sender's order
                (``plan.channels``); pairs without this worker are ignored.
            reads: senders and messages that this worker reads, in the order of its actions (``plan.reads``).
            read_by: messages that have been read once a message has come (``plan.read_by``); they are dropped then.
            chunks: of each stage.
            first: whether a message may come to its reader before the forward that it belongs to is run.
        """
        me = self._groups.me
        self._read_by = read_by or {}
        self._order = None
        sent = {target: messages for (source, target), messages in channels.items() if source == me}
        come = {source: messages for (source, target), messages in channels.items() if target == me}
        self._sender.use(sent, chunks, {message for target, messages in sent.items() for message in messages
                                        if first(target, message)})
        self._receiver.use(come, [message for _, message in reads], chunks, {
            message for messages in come.values() for message in messages if first(me, message)})

    def begin(self, label: Label | None = None) -> None:
        """A new iteration: every channel starts over, and its first receives are posted.

        ``label`` is iteration and attempt, if the times of its messages are of interest.

        No worker begins one before the last but one is committed: its messages have been read.
        """
        self.lags.begin(label)
        self._sender.begin()
        self._receiver.begin()
        if self._order is not None:
            self._order.begin()
        self.post()

    def forget_shapes(self) -> None:
        """Between two iterations, by all workers: later messages may have other shapes, sent in new headers."""
        self._sender.forget_shapes()
        self._receiver.forget_shapes()

    def send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Start sending ``tensors``; never waits for the receiver."""
        target = self._sender.target(message)
        self._post_before(message, sent=True)
        self._sender.send(message, target, tensors)

    def receive(self, message: Message) -> list[torch.Tensor]:
        """The tensors of ``message``; blocks until they have come.

        Raises GenerationOver when the generation ends while waiting.
        """
        self._post_before(message, sent=False)
        tensors = self._receiver.receive(message)
        self._sender.read(self._read_by.get(message, ()))
        return tensors

    def post(self) -> None:
        """Keep receives posted for the next reads, unless transfers have an order."""
        if self._order is None:
            self._receiver.post_next()

    def begun(self) -> dict[tuple[Worker, Worker], tuple[int, int]]:
        """For each channel of this worker, from sender to receiver, the number of transfers that it has begun to send
        and to receive in all iterations; one of the two is 0."""
        me = self._groups.me
        return {**{(me, target): (count, 0) for target, count in self._sender.begun().items()},
                **{(source, me): (0, count) for source, count in self._receiver.begun().items()}}

    @property
    def can_drain(self) -> bool:
        """Whether this worker knows the shapes of all messages that it may have to send in `drain`."""
        return self._sender.can_fill(self._receiver.of_gradients)

    def drain(self, plan: Plan, begun: Mapping[tuple[Worker, Worker], tuple[int, int]]) -> None:
        """The iteration, of ``plan``, is void: complete every transfer that either end has begun, and drop the received
        tensors. ``begun``: as `begun`, of all workers; all have begun the iteration and call this.

        Transfers that are missing at one end are posted in the planned order, as the others were. Raises
        GenerationOver.
        """
        me, sender, receiver = self._groups.me, self._sender, self._receiver
        place: dict[tuple[Worker, Worker, Message], int] = {
            (source, target, message): number for number, (source, target, message) in enumerate(transfers(plan))}
        upto = {pair: max(counts) for pair, counts in begun.items() if me in pair}
        while True:
            due = [(source, target, message) for (source, target), count in upto.items()
                   if (message := sender.due(target, count) if source == me else receiver.due(source, count))]
            if not due:
                break
            source, _, message = min(due, key=lambda each: place[each])
            if source == me:
                sender.fill(message, receiver.of_gradients)
            else:
                receiver.post(message)
        receiver.end()
        sender.end()

    def _post_before(self, message: Message, sent: bool) -> None:
        """Where transfers have an order: post the receives that precede ``message`` in it."""
        if self._order is not None:
            for receive in self._order.before(message, sent):
                self._receiver.post(receive)
