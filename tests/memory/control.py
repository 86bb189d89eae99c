"""The coordinator's decisions, carried out in one process: no sockets, no files, the real machine and messages.

One thread owns the state. What workers say and what they are told are the messages that would travel, as JSON and back,
each on its way for a while. The journal is a list; a coordinator that dies is started again from it.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import json
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from megatron_recycle.control.inbox import input_of
from megatron_recycle.control.planning import Planning
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import inputs
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.machine import step
from megatron_recycle.membership.messages import FROM_WORKER, check, wire_forms
from megatron_recycle.membership.records import restore, taken_up, untold
from megatron_recycle.membership.state import Phase, State

REPORTS_LATE, NO_LOSS = 10.0, 0.5
"""Seconds until reports count as late, and until a hint that no failure explains brings a new generation."""


@functools.cache
def planned(description: str, failed: frozenset[str]) -> str:
    """A plan file's text: jobs of one shape ask for the same plans again and again."""
    return json.dumps(Planning().plan(json.loads(description), failed))


class Control:
    """A coordinator and its launchers, who see every process end at once.

    Args:
        size: number of workers.
        seed: of the time that messages take.
        slow: the share of messages that take a while.
        longest: seconds that they take at most.
    """

    def __init__(self, size: int, seed: int = 0, slow: float = 0.0, longest: float = 0.004) -> None:
        self.state = State(size=size)
        self.journal: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.plans: dict[str, Mapping[str, Any]] = {}
        self.failure: BaseException | None = None
        self.changed = threading.Condition()
        self._links: dict[str, MemoryLink] = {}
        self._draw, self._slow, self._longest = random.Random(seed), slow, longest
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._delays = Delays()
        self._down = False
        self._life = 0
        threading.Thread(target=self._serve, name="memory-control", daemon=True).start()

    # ---- the thread

    def _serve(self) -> None:
        while (run := self._inbox.get()) is not None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001  (the job's test reports it)
                self.failure = error
                with self.changed:
                    self.changed.notify_all()

    def call(self, run: Callable[[], None], after: float = 0.0) -> None:
        """Run this in the coordinator's thread."""
        if after > 0:
            self._delays.at(time.monotonic() + after, lambda: self._inbox.put(run))
        else:
            self._inbox.put(run)

    def close(self) -> None:
        self._delays.close()
        self._inbox.put(None)

    def delay(self) -> float:
        return self._draw.uniform(0, self._longest) if self._draw.random() < self._slow else 0.0

    # ---- what comes in

    def hello(self, link: MemoryLink) -> None:
        """A process has connected."""
        self._links[link.incarnation] = link
        link.greet()

    def received(self, incarnation: str, message: Mapping[str, Any]) -> None:
        kind = message["type"]
        if self._down or kind in ("heartbeat", "measured"):
            return
        if kind == "event":
            member = self.state.known.get(incarnation)
            if member is not None:
                self._emit({"t": time.time(), "generation": self.state.generation, **message["fields"],
                            "event": message["event"], "worker": member.worker})
        elif (happened := input_of(incarnation, message)) is not None:
            self.feed(happened)

    def exited(self, rank: int, pid: int, status: int) -> None:
        """The launcher has seen this process end."""
        moment = time.time()
        self.call(lambda: self._exited(rank, pid, status, moment), after=self.delay())

    def _exited(self, rank: int, pid: int, status: int, moment: float) -> None:
        if self._down:  # the launcher tells the next one
            self.call(lambda: self._exited(rank, pid, status, moment), after=0.001)
        else:
            self.feed(inputs.Exited(rank, pid, status, moment))

    def lost(self, *workers: str, kind: FailureKind = FailureKind.FROZEN) -> None:
        """A detector finds that these have failed, whatever they do."""
        def declare() -> None:
            found = tuple(inputs.Loss(self.state.members[name].incarnation, kind) for name in workers
                          if name in self.state.members)
            if found:
                self.feed(inputs.Lost(found, time.time()))

        self.call(declare)

    # ---- decisions

    def feed(self, happened: inputs.Input) -> None:
        if self._down:
            return
        self.state, decisions = step(self.state, happened, time.time())
        # What is decided is remembered before anybody hears of it.
        self.journal += [json.loads(json.dumps(one.record)) for one in decisions
                         if isinstance(one, (do.Record, do.Note))]
        for decision in decisions:
            self._carry_out(decision)

    def _feed_later(self, happened: inputs.Input, after: float) -> None:
        life = self._life
        self.call(lambda: self.feed(happened) if life == self._life else None, after)

    def _carry_out(self, decision: do.Decision) -> None:
        if isinstance(decision, do.Tell):
            for form in wire_forms(decision):
                text = json.dumps(dict(form.message))
                for incarnation in form.to:
                    if incarnation in self._links:
                        self._links[incarnation].told(text)
        elif isinstance(decision, do.Emit):
            self._emit(decision.event)
        elif isinstance(decision, do.Await):
            self._feed_later(inputs.ReportsLate(decision.generation), REPORTS_LATE)
        elif isinstance(decision, do.AwaitLoss):
            self._feed_later(inputs.NoLoss(decision.generation, decision.since), NO_LOSS)
        elif isinstance(decision, do.MakePlan):
            self._make_plan(decision)
        elif isinstance(decision, do.End):
            with self.changed:
                self.changed.notify_all()

    def _make_plan(self, order: do.MakePlan) -> None:
        plan = json.loads(planned(json.dumps(self.state.description or {}, sort_keys=True), order.failed))
        self.plans[plan["digest"]] = plan
        self._feed_later(inputs.Planned(order.generation, plan, 0.0), self.delay())

    def _emit(self, event: Mapping[str, Any]) -> None:
        with self.changed:
            self.events.append(json.loads(json.dumps(dict(event))))
            self.changed.notify_all()

    def wait_until(self, reached: Callable[[], Any], what: str, limit: float) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: reached() or self.failure, limit):
                raise AssertionError(f"waited in vain for {what}")
        if self.failure is not None:
            raise AssertionError("the coordinator has failed") from self.failure

    # ---- its own death

    def kill(self, absent: float = 0.0) -> None:
        """The coordinator's process dies; another one takes over ``absent`` seconds later, from the journal."""
        def die() -> None:
            if self._down or self.state.phase is Phase.ENDED:
                return
            self._down = True
            self._life += 1
            for link in self._links.values():
                link.lost_since = time.monotonic()
            self.call(self._come_back, absent)

        self.call(die)

    def _come_back(self) -> None:
        told = list(self.events)
        state = taken_up(restore(self.state.size, self.journal, told), self.journal, self.plans.get)
        for event in untold(self.journal, told):
            self._emit(event)
        self.state, self._down = state, False
        if state.phase is not Phase.FORMING and state.ended is None:
            self.feed(inputs.Restarted())
        for link in list(self._links.values()):
            link.greet()


class MemoryLink:
    """Takes `control.link.Link`'s place."""

    def __init__(self, control: Control, *_: Any, hello: Callable[[], Any], handle: Callable[[Mapping[str, Any]], None],
                 **__: Any) -> None:
        self.address, self.error = "memory", None
        self.lost_since: float | None = time.monotonic()
        self.incarnation = ""
        self._control, self._hello, self._handle = control, hello, handle
        self._closed = False
        self._in, self._out = _Way(control), _Way(control)

    def start(self) -> None:
        self.incarnation = self._hello()[0]["incarnation"]
        self._control.call(lambda: self._control.hello(self))

    def greet(self) -> None:
        """In the coordinator's thread: the connection stands."""
        if self._closed:
            return
        self.lost_since = None
        for message in self._hello():
            self._deliver(message)

    def send(self, message: Mapping[str, Any]) -> None:
        text = json.dumps(message)
        if not self._closed and self.lost_since is None:
            self._out.put(lambda: self._deliver(json.loads(text)))

    def _deliver(self, message: Mapping[str, Any]) -> None:
        message = json.loads(json.dumps(message))
        check(message, FROM_WORKER)
        self._control.received(self.incarnation, message)

    def told(self, text: str) -> None:
        """In the coordinator's thread: a message for this process."""
        self._in.put(lambda: None if self._closed else self._handle(json.loads(text)))

    def close(self, timeout: float = 1.0) -> None:
        self._closed = True


class _Way:
    """Messages of one connection in one direction: each takes a while, and none overtakes another."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._waiting: deque[Callable[[], None]] = deque()

    def put(self, deliver: Callable[[], None]) -> None:
        self._waiting.append(deliver)
        self._control.call(self._deliver, self._control.delay())

    def _deliver(self) -> None:
        """Whichever of them is due now, the oldest one is delivered."""
        self._waiting.popleft()()


class Delays:
    """Runs functions a little later, in a thread of its own."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._over = False
        threading.Thread(target=self._run, name="memory-delays", daemon=True).start()

    def at(self, moment: float, function: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (moment, next(self._numbers), function))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._over and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._over:
                    return
                _, _, function = heapq.heappop(self._due)
            function()
