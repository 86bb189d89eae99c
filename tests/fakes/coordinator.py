"""A coordinator without sockets, disk, threads and clock: for tests, and for simulations of long times.

`InMemory` is an `Executor` whose time is an event heap (`Heap`), or whatever else gives it `later` and `clock`. Real
`Agent`s reach it by `InMemory.link`, with checked messages that have been JSON in between and take as long as `delay`
says. All of it happens in whatever runs the time; only a link's `send` may be called by other threads.
"""

from __future__ import annotations

import heapq
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_recycle.control import searches
from megatron_recycle.control.clocks import Timeouts
from megatron_recycle.control.coordinator import input_of
from megatron_recycle.control.executor import Leader
from megatron_recycle.control.parcels import Parcels
from megatron_recycle.control.searches import Plans
from megatron_recycle.control.wire import encode
from megatron_recycle.control.write_ahead import WriteAhead
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import records
from megatron_recycle.membership.event_records import event_of
from megatron_recycle.membership.inputs import (
    FROM_WORKER,
    EndLate,
    FromWorker,
    Input,
    NoLoss,
    PlaceLate,
    Planned,
    ReportsLate,
    Restarted,
    SavedLate,
)
from megatron_recycle.membership.messages import wire_forms
from megatron_recycle.membership.protocol import Fetch, Kinds, Message, Ordered, Said
from megatron_recycle.membership.state import Phase, State
from megatron_recycle.plan.plan_file import PlanFile

Later = Callable[[float, Callable[[], None]], None]
"""(seconds, what) -> runs it in so many seconds; of what is due at the same time the first comes first."""


class Heap:
    """Time that passes only in `run`; `now` is in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._count), what))

    def run(self, seconds: float = 0.0) -> None:
        """Let so much time pass, and do all that is due until then."""
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.now, _, what = heapq.heappop(self._due)
            what()
        self.now = end


class MemoryJournal:
    """The records of a job in a list, as JSON would bring them back; see `journal.Journal`."""

    def __init__(self, records: Sequence[Mapping[str, Any]] = ()) -> None:
        self.path = Path("memory")
        self.records: list[dict[str, Any]] = [dict(record) for record in records]

    def append(self, record: Mapping[str, Any]) -> None:
        self.records.append(json.loads(json.dumps(record)))

    note = append

    def close(self) -> None:
        """Nothing is open."""


class InMemory:
    """The coordinator of one job.

    Args:
        later, clock: how time passes; Unix seconds.
        plans: the planner, which is asked at once and answers after ``plan_s`` seconds.
        delay: gives the seconds that the next message takes; none overtakes another of its connection.
        timeouts: hold whatever the job's description says; without them that overrides the usual ones.
        changed: called after every event, and at the end.
        before: the coordinator that has died, whose journal, events and links this one takes over.

    Attributes:
        events: the job's, as events.jsonl would have them.
        commands: all that launchers were told.
        ended: how the job ended.
    """

    def __init__(self, size: int, plans: Plans, later: Later, clock: Callable[[], float], *, plan_s: float = 0.0,
                 delay: Callable[[], float] = lambda: 0.0, timeouts: Timeouts | None = None,
                 changed: Callable[[], None] = lambda: None, before: InMemory | None = None) -> None:
        self.journal: MemoryJournal = MemoryJournal() if before is None else before.journal
        self.events: list[dict[str, Any]] = [] if before is None else before.events
        self.commands: list[Ordered] = []
        self.ended: do.End | None = None
        self.delay = delay
        self.later = later
        self._plans = plans
        self._clock = clock
        self._plan_s = plan_s
        self._fixed = timeouts is not None
        self._timeouts = timeouts or Timeouts()
        self._changed = changed
        self._links: dict[str, InMemoryLink] = {}
        self._parcels = Parcels()
        self._made: dict[str, PlanFile] = {} if before is None else before._made
        self.dead = False
        self.successor: InMemory | None = None
        state, untold = State(size=size), []
        if before is not None:
            before.die()
            before.successor = self
            kept = self.journal.records
            state = records.taken_up(records.restore(size, kept), kept, self._made.get)
            untold = records.untold(kept, self.events)
        self._leader = Leader(state, WriteAhead(self.journal), self, clock, tolerant=False)
        for event in untold:
            self._tell(event)
        if state.phase is Phase.RETURNING:
            self.feed(Restarted())
        for link in () if before is None else tuple(before._links.values()):
            link.connect(self)

    @property
    def state(self) -> State:
        return self._leader.state

    def feed(self, happened: Input) -> None:
        """Something has happened; what follows is done at once, but for messages and timers."""
        if not self.dead:
            self._leader.feed(happened)

    def die(self) -> None:
        """Hear, decide and tell nothing any more; all connections are lost."""
        self.dead = True
        for link in self._links.values():
            link.lose()

    def link(self, address: str, token: str, **options: Any) -> InMemoryLink:
        """A link of an `Agent` to this coordinator, in place of `link.Link`."""
        return InMemoryLink(self, **options)

    def connected(self, incarnation: str, link: InMemoryLink) -> None:
        """A process is reached by this link from now on."""
        self._links[incarnation] = link

    def received(self, incarnation: str, message: FromWorker) -> None:
        """A process has said this."""
        if isinstance(message, Fetch):
            self._parcels.fetch(incarnation, message, self._links[incarnation].told)
        elif isinstance(message, Said):
            if event := event_of(self.state, incarnation, message.said, self._clock()):
                self._tell(event)
        elif (happened := input_of(message)) is not None:
            self.feed(happened)

    def _tell(self, event: Mapping[str, Any]) -> None:
        self.events.append(json.loads(json.dumps(event)))
        self._changed()

    def _in(self, seconds: float, happened: Input) -> None:
        self.later(seconds, lambda: self.feed(happened))

    # Executor

    def follow(self, before: State, after: State) -> None:
        if not self._fixed and after.description is not None and after.generation != before.generation:
            self._timeouts = self._timeouts.overridden(after.description)

    def note(self, decision: do.Note) -> None:
        self._leader.memory.note(decision)

    def tell(self, decision: do.Tell) -> None:
        for form in wire_forms(decision):
            encoded = encode(self._parcels.form(form.message))
            for incarnation in form.to:
                if (link := self._links.get(incarnation)) is not None:
                    link.told(encoded)

    def command(self, decision: do.Command) -> None:
        self.commands.append(decision.message)
        self._changed()

    def emit(self, decision: do.Emit) -> None:
        self._tell(decision.event)

    def await_reports(self, decision: do.Await) -> None:
        self._in(self._timeouts.report_timeout, ReportsLate(decision.generation))

    def await_loss(self, decision: do.AwaitLoss) -> None:
        self._in(self._timeouts.detection, NoLoss(decision.generation, decision.since))

    def await_place(self, decision: do.AwaitPlace) -> None:
        self._in(self._timeouts.start_timeout, PlaceLate(decision.generation, decision.move))

    def await_saved(self, decision: do.AwaitSaved) -> None:
        limit = self._timeouts.save_timeout if decision.limit is None else decision.limit
        self._in(limit, SavedLate(decision.generation))

    def await_end(self, decision: do.AwaitEnd) -> None:
        self._in(decision.seconds, EndLate())

    def make_plan(self, decision: do.MakePlan) -> None:
        answer = searches.make_plan(self._plans, self.state.job, decision)
        if isinstance(answer, Planned):
            self._made[answer.plan.digest] = answer.plan
        self._in(self._plan_s + self.delay(), answer)

    def make_redo(self, decision: do.MakeRedo) -> None:
        self._in(self._plan_s + self.delay(), searches.make_redo(self._plans, self.state.job, decision))

    def improve(self, decision: do.Improve) -> None:
        """Nobody looks for a better plan."""

    def find_moves(self, decision: do.FindMoves) -> None:
        if (answer := searches.find_moves(self._plans, self.state.job, decision)) is not None:
            self._in(self._plan_s, answer)

    def end(self, decision: do.End) -> None:
        self.ended = decision
        self._changed()


class InMemoryLink:
    """An agent's connection; see `link.Link` for the arguments. It calls the agent in whatever runs the time."""

    def __init__(self, coordinator: InMemory, *, hello: Callable[[], Sequence[Any]],
                 handle: Callable[[Any], None], beat: Callable[[], Message],
                 known: Kinds[Any], **_: Any) -> None:
        self.address = "memory"
        self.error: str | None = None
        self.lost_since: float | None = time.monotonic()
        self._coordinator = coordinator
        self._hello = hello
        self._handle = handle
        self._beat = beat
        self._known = known
        self._incarnation = ""
        self._closed = False
        self._lock = threading.Lock()
        self._in, self._out = _Way(coordinator), _Way(coordinator)

    def start(self) -> None:
        self._coordinator.later(0.0, lambda: self.connect(self._coordinator))

    def connect(self, coordinator: InMemory) -> None:
        """Reach this coordinator from now on, or the one that has taken over, and say what it must be told."""
        while coordinator.successor is not None:
            coordinator = coordinator.successor
        with self._lock:
            self._coordinator = coordinator
            first, *rest = self._hello()
            self._incarnation = first.incarnation
            coordinator.connected(self._incarnation, self)
            if self._closed or coordinator.dead:
                return
            for message in (first, *rest):
                self._put(message)
            self.lost_since = None

    def lose(self) -> None:
        """The connection is lost: so is what is on its way to the coordinator."""
        with self._lock:
            self.lost_since = time.monotonic()

    def beat(self) -> None:
        """Give a sign of life, which carries what was asked for in a signal handler."""
        self.send(self._beat())

    def send(self, message: Message) -> None:
        with self._lock:
            if self.lost_since is None and not self._closed:
                self._put(message)

    def _put(self, message: Message) -> None:
        encoded, to = encode(message), self._coordinator
        self._out.put(lambda: None if to.dead else to.received(
            self._incarnation, FROM_WORKER.read(json.loads(encoded))))

    def told(self, encoded: bytes) -> None:
        """A message of the coordinator is on its way to the agent."""
        self._in.put(lambda: None if self._closed else self._handle(self._known.read(json.loads(encoded))))

    def close(self, timeout: float = 1.0) -> None:
        self._closed = True


class _Way:
    """Messages of one connection in one direction: each takes a while, and none overtakes another."""

    def __init__(self, coordinator: InMemory) -> None:
        self._later, self._delay = coordinator.later, coordinator.delay
        self._waiting: deque[Callable[[], None]] = deque()

    def put(self, deliver: Callable[[], None]) -> None:
        self._waiting.append(deliver)
        self._later(self._delay(), self._deliver)

    def _deliver(self) -> None:
        """Whichever of them is due now, the oldest one is delivered."""
        self._waiting.popleft()()
