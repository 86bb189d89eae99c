"""The server around the membership machine: sockets, clocks, threads and the journal.

One event loop owns the state. It never waits for a plan (threads do) and never for a peer (writes are
buffered, and a peer that does not read is cut off). Whatever the machine decides is on disk before any of it is
announced, and then carried out in order and to its end, whatever fails of it on the way.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_recycle.control.connection import Connection
from megatron_recycle.control.journal import Journal
from megatron_recycle.control.memory import Memory
from megatron_recycle.control.strangers import Strangers
from megatron_recycle.control.watch import Watch
from megatron_recycle.control.wire import Message, encode
from megatron_recycle.membership import messages, moving
from megatron_recycle.membership.decisions import (
    Await,
    AwaitLoss,
    AwaitSaved,
    Decision,
    Emit,
    End,
    FindMoves,
    Improve,
    MakePlan,
    Note,
    Record,
    Tell,
)
from megatron_recycle.membership.detectors import RateLimit
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.inputs import (
    Adopted,
    Boundary,
    Committed,
    Exited,
    Finished,
    Hello,
    Hinted,
    Holds,
    Improved,
    Input,
    Interrupted,
    Leave,
    Loss,
    Lost,
    MovesFound,
    NoLoss,
    PlanFailed,
    Planned,
    Raised,
    Ready,
    Reported,
    ReportsLate,
    Restarted,
    Resumed,
    Saved,
    SavedLate,
    StaysOut,
    Stuck,
)
from megatron_recycle.membership.state import Member, Phase, State
from megatron_recycle.membership.vacancies import Offered, Places, free_places

Plan = dict[str, Any]
Planner = Callable[[Mapping[str, Any], "frozenset[str]"], Plan]
"""(description, failed) -> plan, at once; runs in a thread."""
Improver = Callable[[Mapping[str, Any], "frozenset[str]", Plan, threading.Event], "Plan | None"]
"""(description, failed, plan, cancelled) -> a better plan or None; slow, runs in a thread."""
Mover = Callable[[Mapping[str, Any], "frozenset[str]"], "dict[str, str]"]
"""(description, failed) -> which members had better take which empty positions; runs in a thread."""

_KEPT = ("started", "suspected", "joined", "move_failed")
"""Events that a launcher is told again when it comes back."""
_SPARE_STRANGERS = 64
"""Connections without a hello, beside one for each worker; more of them would only cost memory."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timeouts:
    """Seconds. A description that names one of the first three overrides it when training begins."""

    heartbeat_interval: float = 0.5
    heartbeat_timeout: float = 10.0
    report_timeout: float = 30.0
    start_timeout: float = 600.0
    save_timeout: float = 600.0
    hello_timeout: float = 5.0

    @property
    def detection(self) -> float:
        """Within this any failure of a process or host is found."""
        return self.heartbeat_timeout + 3 * self.heartbeat_interval

    def overridden(self, description: Mapping[str, Any]) -> Timeouts:
        names = ("heartbeat_interval", "heartbeat_timeout", "report_timeout")
        return Timeouts(**{**vars(self), **{n: float(description[n]) for n in names if description.get(n)}})


class Coordinator:
    """Decides who is in, for one job.

    Args:
        size: number of workers.
        token: the job's token.
        journal: where decisions are kept.
        plan, improve, moves: the planner (this package does not know it).
        emit: gets every event, see observe.events; called in the event loop.
        listener: a socket that listens already; without one, any free port of 127.0.0.1.
        launched: whether launchers report exits. If not, the end of a worker's connection is its exit.
        offered: what a host that joins is told; None: no host can join.
        state: what `records.restore` has read from the journal of a coordinator that has died.
        told: the events it has told; a launcher must know of every failure, to judge its workers' ends.
        host: where this is, as workers there name their host.
    """

    def __init__(
        self,
        *,
        size: int,
        token: str,
        journal: Journal,
        plan: Planner,
        improve: Improver | None = None,
        moves: Mover | None = None,
        emit: Callable[[Mapping[str, Any]], None],
        timeouts: Timeouts | None = None,
        listener: socket.socket | None = None,
        launched: bool = True,
        state: State | None = None,
        offered: Offered | None = None,
        told: Iterable[Mapping[str, Any]] = (),
        host: str = "",
    ) -> None:
        self.state = (State(size=size) if state is None else state).with_(host=host)
        self.token = token
        self.timeouts = timeouts or Timeouts()
        self.hello_timeout = self.timeouts.hello_timeout
        self._memory = Memory(journal)
        self._plan = plan
        self._improve = improve
        self._moves = moves
        self._emit = emit
        self._listener = listener
        self._launched = launched
        self._places = None if offered is None else Places(offered)
        self._workers: dict[str, Connection] = {}
        self._launchers: set[Connection] = set()
        self._connections: set[Connection] = set()
        self._progress: dict[str, Any] = {}
        told = list(told)
        self._failures = [dict(event) for event in told if event["event"] in _KEPT]
        self._hints = {_hint_key(event) for event in told if event["event"] == "hint"}
        self._strangers: Strangers[Connection] = Strangers(self.state.size + _SPARE_STRANGERS)
        self._watch = Watch(self.timeouts.heartbeat_interval, self.timeouts.heartbeat_timeout)
        self._refusals: RateLimit[str] = RateLimit(60.0)
        self._cancelled = threading.Event()
        self._ended: asyncio.Future[End] | None = None
        self._quiet = asyncio.Event()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Server | None = None

    # Life

    async def start(self) -> str:
        """Listen; returns "host:port"."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        listener = self._listener or socket.create_server(("127.0.0.1", 0))
        self._server = await self._loop.create_server(lambda: Connection(self), sock=listener)
        self._loop.call_later(self.timeouts.start_timeout, self._start_late)
        if self.state.phase is not Phase.FORMING:
            self._come_back()
        self._tick()
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    def _come_back(self) -> None:
        """Begin from a restored state: members have as long as a heartbeat may take to connect again."""
        if self.state.ended is not None:
            self._announce_end(End(*self.state.ended))
            return
        self._new_generation()
        self._feed(Restarted())

    async def wait_ended(self) -> End:
        """How the job ended."""
        assert self._ended is not None, "start() comes first"
        return await self._ended

    async def wait_quiet(self, linger: float | None) -> None:
        """Until nobody is connected any more, at most `linger` seconds (None: no limit)."""
        try:
            await asyncio.wait_for(self._quiet.wait(), linger)
        except asyncio.TimeoutError:
            log.info("recycle: %d connections are still open", len(self._connections))

    async def close(self) -> None:
        """Stop serving; nothing is decided afterwards."""
        self._closed = True
        self._cancelled.set()
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.close()
        await asyncio.sleep(0)  # the connections notice
        self._memory.close()

    def interrupt(self, status: int, message: str) -> None:
        """End the job from outside; call it in the event loop."""
        self._feed(Interrupted(status, message))

    # What comes in (called by the connections)

    def connected(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._quiet.clear()
        if (oldest := self._strangers.came(connection, connection.source)) is not None:
            self.refused(oldest.source, f"{len(self._strangers)} connections have not said hello yet")
            oldest.close()

    def disconnected(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._strangers.gone(connection)
        self._launchers.discard(connection)
        if connection.host is not None and all(other.host != connection.host for other in self._launchers):
            self._watch.launcher_hung_up(connection.host, time.monotonic())
        worker = connection.incarnation
        if worker is not None and self._workers.get(worker) is connection:
            del self._workers[worker]
            self._watch.hung_up(worker, time.monotonic())
            if not self._launched:
                self._vanished(worker, time.time())
        if not self._connections:
            self._quiet.set()

    def refused(self, source: str, reason: str) -> None:
        """A stranger or a broken peer; it may not fill the log."""
        if self._refusals.allows(source, time.monotonic()):
            log.warning("recycle: refused a connection from %s: %s", source, reason)
            self._emit({"event": "refused", "t": time.time(), "source": source, "reason": reason})

    def received(self, connection: Connection, message: Message) -> None:
        """A checked message of an authenticated peer."""
        self._strangers.gone(connection)
        if connection.role == "newcomer":
            if message["type"] == "hello":
                connection.send(messages.learnt(self.state, message["rank"]))
        elif connection.role == "launcher":
            self._from_launcher(connection, message)
        elif message["type"] == "hello":
            self._welcome(connection, message)
        elif connection.incarnation is not None:
            self._watch.beat(connection.incarnation, time.monotonic())
            self._from_worker(connection.incarnation, message)

    def _welcome(self, connection: Connection, message: Message) -> None:
        names = ("worker", "rank", "incarnation", "pid", "host")
        member = Member(**{name: message[name] for name in names})
        before = self._workers.get(member.incarnation)
        self._workers[member.incarnation] = connection
        connection.incarnation = member.incarnation
        if self._places is not None:
            self._places.taken(member.worker)
        if before is not None and before is not connection:
            before.close()
        self._watch.came(member.incarnation)
        self._watch.beat(member.incarnation, time.monotonic())
        self._feed(Hello(member, message["generation"]))

    def _from_worker(self, incarnation: str, message: Message) -> None:
        kind = message["type"]
        if kind == "heartbeat":
            self._progress[incarnation] = message["progress"]
            self._watch.told(incarnation, message["progress"], time.monotonic())
        elif kind == "event":
            self._passed_on(incarnation, message["event"], message["fields"])
        elif kind == "hint":
            fields = {"generation": message["generation"], "error": message["error"][:500]}
            self._hint(incarnation, fields)
            self._feed(Hinted(incarnation, fields["generation"], fields["error"]))
        elif kind == "raised" or (kind == "ending" and message["fault"] is not None):
            number = message.get("number", 0)
            self._feed(Raised(incarnation, Fault.parse(message["fault"]), message["t"], number))
        elif kind == "ending":
            self._vanished(incarnation, message["t"])
        else:
            self._feed(_INPUTS[kind](incarnation, message))

    def _from_launcher(self, connection: Connection, message: Message) -> None:
        kind = message["type"]
        if kind == "hello":
            connection.host = message["host"]
            self._launchers.add(connection)
            self._watch.launcher_came(connection.host)
            for event in self._failures:
                connection.send({"type": "event", "event": event})
            for event in moving.pending(self.state, time.time()):
                connection.send({"type": "event", "event": event})
            if self._ended is not None and self._ended.done():
                connection.send({"type": "end", **vars(self._ended.result())})
        elif kind == "exit":
            names = ("rank", "pid", "status", "log", "move")
            self._feed(Exited(since=message["t"], **{name: message[name] for name in names}))
        elif kind == "stays_out":
            self._feed(StaysOut(message["rank"]))
        elif kind == "join":
            connection.send(free_places(self.state, self._places, message["count"], time.monotonic()))
        elif kind == "interrupt":
            self._feed(Interrupted(message["status"], message["message"]))
        assert connection.host is not None
        self._watch.launcher_beat(connection.host, time.monotonic())

    def _passed_on(self, incarnation: str, name: str, fields: Mapping[str, Any]) -> None:
        """A worker's own event; what a fenced one says is marked, since it counts for nothing."""
        member = self.state.known.get(incarnation)
        if member is None:
            return
        event = {"t": time.time(), "generation": self.state.generation, **fields, "event": name}
        event["worker"] = member.worker
        if incarnation in self.state.fenced:
            event["fenced"] = True
        if name == "profile":  # one per worker and iteration, for nobody but this host
            self._emit(event)
        else:
            self._tell_event(event)

    def _hint(self, incarnation: str, fields: Mapping[str, Any]) -> None:
        """Workers repeat their last hint after a reconnect; it is passed on once."""
        member = self.state.known.get(incarnation)
        key = _hint_key({**fields, "worker": member.worker}) if member is not None else None
        if key is not None and key not in self._hints:
            self._hints.add(key)
            self._passed_on(incarnation, "hint", fields)

    def _vanished(self, incarnation: str, since: float) -> None:
        """A process is about to end, or has: without a launcher the end of a connection is the end of the process."""
        member = self.state.known.get(incarnation)
        if member is not None and incarnation not in self.state.fenced:
            log = f"worker-{member.rank}.log in the run's folder" if self._launched else ""
            self._feed(Exited(member.rank, member.pid, None, since, log))

    # Clocks

    def _tick(self) -> None:
        assert self._loop is not None
        if self.state.phase is not Phase.ENDED and not self._closed:
            pace = min(0.5, max(0.05, self.timeouts.heartbeat_interval / 2))
            self._loop.call_later(pace, self._tick)
        now = time.monotonic()
        found = self._watch.tick(now)
        since = time.time() - (now - found.since)
        if found.lost:
            self._feed(Lost(tuple(Loss(incarnation, kind) for incarnation, kind in found.lost.items()), since))
        elif found.waiting is not None:
            waiting = {self.state.known[key].worker: doing.what for key, doing in found.waiting.items()}
            self._feed(Stuck(self.state.generation, waiting, since))

    def _start_late(self) -> None:
        if self.state.phase is not Phase.FORMING:
            return
        ready = {member.rank for member in self.state.known.values() if member.worker in self.state.descriptions}
        missing = ", ".join(str(rank) for rank in range(self.state.size) if rank not in ready)
        limit = f"{self.timeouts.start_timeout:.0f} s"
        self._feed(Interrupted(1, f"not ready within {limit}: rank {missing}; see their logs"))

    # What goes out

    def _feed(self, happened: Input) -> None:
        if self._closed:
            return
        before = self.state
        self.state, decisions = self._memory.step(before, happened, time.time())
        if self.state.generation != before.generation:
            self._new_generation()
        elif (self.state.joiners, self.state.stranded) != (before.joiners, before.stranded):
            self._watch_all()
        for decision in decisions:
            try:
                self._carry_out(decision)
            except Exception:  # the others are owed to everybody all the same
                log.exception("recycle: %s could not be carried out", type(decision).__name__)

    def tell(self, event: Mapping[str, Any]) -> None:
        """Record an event, and tell the launchers."""
        self._tell_event(event)

    def declare_out(self, name: str, kind: FailureKind) -> None:
        """Go on without the member of this name, which lives; call it in the event loop."""
        if (member := self.state.members.get(name)) is not None:
            self._feed(Lost((Loss(member.incarnation, kind),), time.time()))

    def search_again(self) -> None:
        """What the planner knows has changed: look for a better plan for the membership in force."""
        if self.state.phase is Phase.TRAINING and self.state.plan is not None:
            self._carry_out(Improve(self.state.generation, self.state.failed, self.state.plan))
            for search in moving.seek(self.state):
                self._carry_out(search)

    def _new_generation(self) -> None:
        """Timers and searches of the last generation are void."""
        self._cancel_search()
        if self.state.description is not None:
            self.timeouts = self.timeouts.overridden(self.state.description)
        self._watch_all()

    def _cancel_search(self) -> None:
        self._cancelled.set()
        self._cancelled = threading.Event()

    def _watch_all(self) -> None:
        interval, timeout = self.timeouts.heartbeat_interval, self.timeouts.heartbeat_timeout
        others = (*self.state.joiners.values(), *self.state.stranded.values())
        self._watch.members(self.state.members.values(), others, interval, timeout, time.monotonic())

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Record):
            return  # on disk already
        if isinstance(decision, Note):
            self._memory.note(decision)
        elif isinstance(decision, Tell):
            for form in messages.wire_forms(decision):
                encoded = encode(dict(form.message))
                for incarnation in form.to:
                    if (connection := self._workers.get(incarnation)) is not None:
                        connection.send_encoded(encoded)
        elif isinstance(decision, Emit):
            self._tell_event(decision.event)
        elif isinstance(decision, Await):
            assert self._loop is not None
            late = ReportsLate(decision.generation)
            self._loop.call_later(self.timeouts.report_timeout, self._feed, late)
        elif isinstance(decision, AwaitSaved):
            assert self._loop is not None
            limit = self.timeouts.save_timeout if decision.limit is None else decision.limit
            self._loop.call_later(limit, self._feed, SavedLate(decision.generation))
        elif isinstance(decision, AwaitLoss):
            assert self._loop is not None
            self._loop.call_later(self.timeouts.detection, self._feed, NoLoss(decision.generation, decision.since))
        elif isinstance(decision, MakePlan):
            self._in_thread("recycle-plan", self._make_plan, decision)
        elif isinstance(decision, Improve):
            if self._improve is not None:
                self._cancel_search()  # one at a time: the last one was asked something else
                self._in_thread("recycle-improve", self._look_for_better, decision, self._cancelled)
        elif isinstance(decision, FindMoves):
            if self._moves is not None:
                self._in_thread("recycle-moves", self._find_moves, decision)
        else:
            self._announce_end(decision)

    def _tell_event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "suspected":
            doing = self._progress.get(self._incarnation_of(event))
            event = {**event, "progress": doing} if doing else event
        self._emit(event)
        if event["event"] in _KEPT:
            self._failures.append(dict(event))
        for launcher in self._launchers:
            launcher.send({"type": "event", "event": dict(event)})

    def _incarnation_of(self, event: Mapping[str, Any]) -> str:
        key = (event["worker"], event.get("pid"))
        return next((i for i, m in self.state.known.items() if (m.worker, m.pid) == key), "")

    def _announce_end(self, end: End) -> None:
        self._cancelled.set()
        assert self._ended is not None
        for launcher in self._launchers:
            launcher.send({"type": "end", "status": end.status, "message": end.message})
        if not self._ended.done():
            self._ended.set_result(end)

    # Threads

    def _in_thread(self, name: str, work: Callable[..., Input | None], *args: Any) -> None:
        """Run `work` beside the event loop and feed what it returns. A daemon: it must not delay the end."""
        loop = self._loop
        assert loop is not None

        def run() -> None:
            happened = work(*args)
            if happened is not None and not loop.is_closed():
                loop.call_soon_threadsafe(self._feed, happened)

        try:
            threading.Thread(target=run, name=name, daemon=True).start()
        except RuntimeError:  # the machine has no thread left for us
            log.exception("recycle: no thread for %s", name)
            if work == self._make_plan:  # everybody waits for it: rather stand still ourselves
                loop.call_soon(run)

    def _make_plan(self, order: MakePlan) -> Input:
        began = time.monotonic()
        try:
            plan = self._plan(self.state.description or {}, order.failed)
        except Exception as error:  # whatever a planner meets, the job must hear of it instead of waiting
            log.exception("recycle: planning failed")
            return PlanFailed(order.generation, str(error) or type(error).__name__)
        return Planned(order.generation, plan, (time.monotonic() - began) * 1000)

    def _find_moves(self, order: FindMoves) -> Input | None:
        assert self._moves is not None
        try:
            found = self._moves(self.state.description or {}, order.failed)
        except Exception:  # everybody trains where it is
            log.exception("recycle: the search for moves failed")
            return None
        return MovesFound(order.generation, found) if found else None

    def _look_for_better(self, order: Improve, cancelled: threading.Event) -> Input | None:
        began = time.monotonic()
        assert self._improve is not None
        try:
            plan = self._improve(self.state.description or {}, order.failed, dict(order.plan), cancelled)
        except Exception:  # the plan in use is legal; a failed search costs only speed
            log.exception("recycle: the search for a better plan failed")
            return None
        if plan is None or cancelled.is_set():
            return None
        return Improved(order.generation, plan, (time.monotonic() - began) * 1000)


def _hint_key(event: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two hints the same."""
    return event.get("worker"), event.get("generation"), event.get("error")


_INPUTS: Mapping[str, Callable[[str, Message], Input]] = {
    "ready": lambda who, m: Ready(who, m["description"], m["report"], m.get("learnt", ())),
    "report": lambda who, m: Reported(who, m["generation"], m["report"]),
    "holds": lambda who, m: Holds(who, m["generation"], m["received"]),
    "resumed": lambda who, m: Resumed(who, m["generation"], m["t"]),
    "committed": lambda who, m: Committed(who, m["iteration"], m["loss"]),
    "adopted": lambda who, m: Adopted(who, m["generation"], m["iteration"], m["digest"]),
    "saved": lambda who, m: Saved(who, m["generation"], m["place"][:1000], m["error"][:500]),
    "leave": lambda who, m: Leave(who),
    "boundary": lambda who, m: Boundary(who, m["generation"], m["iteration"], m["t"]),
    "finished": lambda who, m: Finished(who, m["generation"]),
}
