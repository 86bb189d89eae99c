"""A coordinator without sockets, disk, threads and clock: for tests, and for simulations of long times.

`InMemory` is an `Executor` whose time is an event heap (`Heap`), or whatever else gives it `later` and `clock`. Real
`Agent`s reach it by `InMemory.link`, with checked messages that have been JSON in between.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_recycle.control import searches
from megatron_recycle.control.clocks import Timeouts
from megatron_recycle.control.executor import Leader
from megatron_recycle.control.inbox import input_of
from megatron_recycle.control.memory import Memory
from megatron_recycle.control.searches import Plans
from megatron_recycle.control.wire import Message, encode
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership import records
from megatron_recycle.membership.inputs import Input, NoLoss, ReportsLate, Restarted, SavedLate
from megatron_recycle.membership.messages import FROM_WORKER, check, wire_forms
from megatron_recycle.membership.state import Phase, State

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
        before: the coordinator that has died, whose journal, events and links this one takes over.

    Attributes:
        events: what was emitted.
        commands: what launchers were told.
        ended: how the job ended.
    """

    def __init__(self, size: int, plans: Plans, later: Later, clock: Callable[[], float], *, plan_s: float = 0.0,
                 timeouts: Timeouts | None = None, before: InMemory | None = None) -> None:
        self.journal: MemoryJournal = MemoryJournal() if before is None else before.journal
        self.events: list[dict[str, Any]] = [] if before is None else before.events
        self.commands: list[Message] = []
        self.ended: do.End | None = None
        self._plans = plans
        self._later = later
        self._plan_s = plan_s
        self._timeouts = timeouts or Timeouts()
        self._links: dict[str, InMemoryLink] = {}
        self._made: dict[str, Mapping[str, Any]] = {} if before is None else before._made
        self._dead = False
        state = State(size=size)
        if before is not None:
            before._dead = True
            kept = self.journal.records
            state = records.taken_up(records.restore(size, kept, self.events), kept, self._made.get)
            self.events += records.untold(kept, self.events)
        self._leader = Leader(state, Memory(self.journal), self, clock)
        if before is not None:
            if state.phase is Phase.RETURNING:
                self.feed(Restarted())
            for link in tuple(before._links.values()):
                link.connect(self)

    @property
    def state(self) -> State:
        return self._leader.state

    def feed(self, happened: Input) -> None:
        """Something has happened; what follows is done at once, but for messages and timers."""
        if not self._dead:
            self._leader.feed(happened)

    def link(self, address: str, token: str, **options: Any) -> InMemoryLink:
        """A link of an `Agent` to this coordinator, in place of `link.Link`."""
        return InMemoryLink(self, **options)

    def received(self, incarnation: str, message: Message) -> None:
        """A process has said this."""
        if (happened := input_of(incarnation, check(message, FROM_WORKER))) is not None:
            self.feed(happened)

    def connected(self, incarnation: str, link: InMemoryLink) -> None:
        self._links[incarnation] = link

    def soon(self, what: Callable[[], None]) -> None:
        """A message is on its way: do this when it arrives, unless this coordinator is dead by then."""
        self._later(0.0, lambda: None if self._dead else what())

    def _in(self, seconds: float, happened: Input) -> None:
        self._later(seconds, lambda: self.feed(happened))

    # Executor

    def follow(self, before: State, after: State) -> None:
        if after.description is not None and after.generation != before.generation:
            self._timeouts = self._timeouts.overridden(after.description)

    def note(self, decision: do.Note) -> None:
        self._leader.memory.note(decision)

    def tell(self, decision: do.Tell) -> None:
        for form in wire_forms(decision):
            encoded = encode(dict(form.message))
            for incarnation in form.to:
                if (link := self._links.get(incarnation)) is not None:
                    link.told(encoded)

    def command(self, decision: do.Command) -> None:
        self.commands.append(json.loads(json.dumps(decision.message)))

    def emit(self, decision: do.Emit) -> None:
        self.events.append(json.loads(json.dumps(decision.event)))

    def await_reports(self, decision: do.Await) -> None:
        self._in(self._timeouts.report_timeout, ReportsLate(decision.generation))

    def await_loss(self, decision: do.AwaitLoss) -> None:
        self._in(self._timeouts.detection, NoLoss(decision.generation, decision.since))

    def await_saved(self, decision: do.AwaitSaved) -> None:
        limit = self._timeouts.save_timeout if decision.limit is None else decision.limit
        self._in(limit, SavedLate(decision.generation))

    def make_plan(self, decision: do.MakePlan) -> None:
        answer = searches.make_plan(self._plans, self._leader.state.description or {}, decision)
        plan = getattr(answer, "plan", {})
        self._made[plan.get("digest", "")] = plan
        self._in(self._plan_s, answer)

    def improve(self, decision: do.Improve) -> None:
        """Nobody looks for a better plan."""

    def find_moves(self, decision: do.FindMoves) -> None:
        if (answer := searches.find_moves(self._plans, self._leader.state.description or {}, decision)) is not None:
            self._in(self._plan_s, answer)

    def end(self, decision: do.End) -> None:
        self.ended = decision


class InMemoryLink:
    """An agent's connection; see `link.Link` for the arguments. It calls the agent in whatever runs the time."""

    def __init__(self, coordinator: InMemory, *, hello: Callable[[], Sequence[Message]],
                 handle: Callable[[Message], None], beat: Callable[[], Message],
                 known: Mapping[str, Mapping[str, Any]], **_: Any) -> None:
        self.address = "memory"
        self.error: str | None = None
        self.lost_since: float | None = 0.0
        self._coordinator = coordinator
        self._hello = hello
        self._handle = handle
        self._beat = beat
        self._known = known
        self._incarnation = ""

    def start(self) -> None:
        self.connect(self._coordinator)

    def connect(self, coordinator: InMemory) -> None:
        """Reach this coordinator from now on, and say what it must be told."""
        self._coordinator, self.lost_since = coordinator, None
        first, *rest = self._hello()
        self._incarnation = first["incarnation"]
        coordinator.connected(self._incarnation, self)
        for message in (first, *rest):
            self.send(message)

    def beat(self) -> None:
        """Give a sign of life, which carries what was asked for in a signal handler."""
        self.send(self._beat())

    def send(self, message: Message) -> None:
        if self.lost_since is None:
            encoded, to = encode(message), self._coordinator
            to.soon(lambda: to.received(self._incarnation, json.loads(encoded)))

    def told(self, encoded: bytes) -> None:
        """A message of the coordinator is on its way to the agent."""
        self._coordinator.soon(lambda: self._handle(check(json.loads(encoded), self._known)))

    def close(self, timeout: float = 1.0) -> None:
        self.lost_since = 0.0
