"""The transfers of a plan under rules like NCCL's, in memory: whether they all come to an end, and what hangs if not.

Each worker is a program that makes the calls of the runtime for some iterations. A communicator has a queue on each of
its workers, in the order of the calls. A transfer takes place once it is at the head of both of its queues and all that
its worker's stream waits for has taken place. Nothing here knows how a plan is ordered: only `Rules` and the calls do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_recycle.plan import Message, Plan, Transfer, Worker, channels, postings, reads, transfers


@dataclass(frozen=True)
class Rules:
    """What a library does with the calls.

    Attributes:
        order: "planned", as `transfers` says; "ahead": every receive is posted ``ahead`` messages before it is read.
        cut: workers of a communicator: "all" one for everybody, "pair" one per pair, "direction" one per ordered pair.
        connected: communicators are there from the start. Else a worker's first use of one waits for the other's.
        host_waits: a wait holds up the worker's own calls, not its stream alone.
        buffered: a send ends by itself once it is at the head.
        exact: the stage's gradients go as pieces between peers, in batches, and not as one all-reduce.
    """

    order: str = "planned"
    ahead: int = 2
    cut: str = "all"
    connected: bool = True
    host_waits: bool = False
    buffered: bool = False
    exact: bool = False


@dataclass(eq=False)
class Operation:
    """One call on one worker. ``members`` of what takes place at once: 2 for a transfer."""

    what: str
    me: Worker
    queue: deque[Operation]
    waits_for: list[Operation]
    members: int
    alone: bool
    mates: list[Operation]
    done: bool = False

    @property
    def ready(self) -> bool:
        return bool(self.queue) and self.queue[0] is self and all(other.done for other in self.waits_for)


Program = Iterator[str]


@dataclass
class Queues:
    """All workers of a plan under ``rules``, for ``iterations``."""

    plan: Plan
    rules: Rules
    iterations: int = 2
    _queues: dict[tuple[Any, Worker], deque[Operation]] = field(default_factory=lambda: defaultdict(deque))
    _mates: dict[Any, list[Operation]] = field(default_factory=dict)
    _used: set[tuple[Any, Worker]] = field(default_factory=set)
    _stream: dict[Worker, list[Operation]] = field(default_factory=lambda: defaultdict(list))

    def stuck(self) -> list[str]:
        """Where each worker stands that does not come to its end; nothing if all do."""
        programs = {me: self._program(me) for me in self.plan.workers}
        where = dict.fromkeys(programs, "")
        moved = True
        while moved and programs:
            moved = False
            for me, program in list(programs.items()):
                before = self._calls
                try:
                    where[me] = next(program)
                except StopIteration:
                    del programs[me]
                moved = moved or me not in programs or self._calls != before
            moved = self._take_place() or moved
        queued = [f"{me} on {communicator}: {' < '.join(each.what for each in list(queue)[:4])}"
                  for (communicator, me), queue in self._queues.items() if queue]
        return [f"{me} waits: {where[me]}" for me in programs] + queued

    _calls = 0

    def _take_place(self) -> bool:
        moved = False
        again = True
        while again:
            again = False
            for queue in list(self._queues.values()):
                while queue and self._head(queue[0]):
                    again = moved = True
        return moved

    def _head(self, first: Operation) -> bool:
        if not first.ready:
            return False
        if first.alone:
            first.done = True
            first.queue.popleft()
            return True
        if len(first.mates) < first.members or not all(mate.done or mate.ready for mate in first.mates):
            return False
        for mate in first.mates:
            if not mate.done:
                mate.done = True
                mate.queue.popleft()
        return True

    # ---- calls

    def _start(self, me: Worker, communicator: Any, members: Sequence[Worker], what: str, key: Any,
               alone: bool = False) -> Iterator[Any]:
        if not self.rules.connected:
            if (communicator, me) not in self._used:
                self._calls += 1
                self._used.add((communicator, me))
            while not all((communicator, other) in self._used for other in members):
                yield f"first use of {communicator} for {what}"
        mates = self._mates.setdefault(key, [])
        queue = self._queues[communicator, me]
        started = Operation(what, me, queue, [op for op in self._stream[me] if not op.done], len(members), alone, mates)
        mates.append(started)
        queue.append(started)
        self._calls += 1
        return started

    def _wait(self, me: Worker, operation: Operation) -> Program:
        self._stream[me] = [op for op in self._stream[me] if not op.done] + [operation]
        while self.rules.host_waits and not operation.done:
            yield f"wait for {operation.what}"

    def _transfer(self, me: Worker, source: Worker, target: Worker, message: Any, iteration: int) -> Iterator[Any]:
        cut: Callable[[], Any] = {"all": lambda: "all", "pair": lambda: tuple(sorted((source, target))),
                                  "direction": lambda: (source, target)}[self.rules.cut]
        return self._start(me, cut(), sorted((source, target)), f"{message} {source}>{target}",
                           (iteration, source, target, message), self.rules.buffered and me == source)

    # ---- a worker

    def _program(self, me: Worker) -> Program:
        for iteration in range(self.iterations):
            yield from self._iteration(me, iteration)

    def _iteration(self, me: Worker, iteration: int) -> Program:
        plan, rules = self.plan, self.rules
        to = {message: target for (source, target), listed in channels(plan).items() if source == me
              for message in listed}
        mine, row = postings(transfers(plan), me), reads(plan, me)
        place = {each: number for number, each in enumerate(mine)}
        source_of = {message: source for source, message in row}
        sends = iter([each for each in mine if each.source == me])
        posted: dict[Message, Operation] = {}
        read = next_post = 0

        def post(messages: Iterable[Message]) -> Program:
            for message in messages:
                if message in source_of and message not in posted:
                    posted[message] = yield from self._transfer(me, source_of[message], me, message, iteration)

        def planned(upto: int) -> Program:
            nonlocal next_post
            due, next_post = mine[next_post:upto], max(next_post, upto)
            yield from post(each.message for each in due if each.target == me)

        def ahead() -> Program:
            if rules.order == "ahead":
                yield from post(message for _, message in row[read:read + rules.ahead])

        yield from ahead()
        before = plan.done.get(me, 0)
        for number, (kind, d, m, _) in enumerate(plan.actions(me)):
            if kind == "S":
                yield from self._reduce(me, iteration)
            if kind not in ("F", "B", "FB"):
                continue
            message = Message("F" if kind == "F" else "B", d, m)
            if message in source_of and number >= before:
                if rules.order == "planned":
                    yield from planned(place[Transfer(source_of[message], me, message)] + 1)
                yield from post([message])
                read += 1
                yield from self._wait(me, posted[message])
            if message in to:
                if rules.order == "planned":
                    own = Transfer(me, to[message], message)
                    assert next(sends) == own, "sends in another order than planned"
                    yield from planned(place[own])
                yield from self._transfer(me, me, to[message], message, iteration)
            yield from ahead()

    def _reduce(self, me: Worker, iteration: int) -> Program:
        peers = self.plan.problem.live(me.stage)
        for phase in ("pieces", "shares") if self.rules.exact else ("sum",):
            if len(peers) > 1:  # a batch is one operation of all that are in it
                operation = yield from self._start(me, ("stage", me.stage), peers, phase, (iteration, me.stage, phase))
                yield from self._wait(me, operation)
