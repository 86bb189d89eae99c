"""The coordinator of one job: messages of its processes become inputs of the membership machine, whose decisions are
carried out.

The pieces: `server` has the connections, `clocks` the detectors and timeouts, `searches` the planner's threads,
`event_feed` the events, `write_ahead` the journal; `asyncio_executor` carries decisions out, and `executor.Leader`
drives it. One event loop owns the state. It never waits for a plan and never for a peer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from megatron_recycle.control.admission import of_guests
from megatron_recycle.control.asyncio_executor import AsyncioExecutor
from megatron_recycle.control.clocks import Clocks, Timeouts
from megatron_recycle.control.event_feed import EventFeed
from megatron_recycle.control.executor import Leader, carry_out
from megatron_recycle.control.journal import JournalError
from megatron_recycle.control.leader_election import LeadLost
from megatron_recycle.control.operators import Operators
from megatron_recycle.control.profiles import Conclusions
from megatron_recycle.control.rendezvous_store import RendezvousStore
from megatron_recycle.control.searches import Plans, Searches
from megatron_recycle.control.server import Connection, Server
from megatron_recycle.control.sockets import FOUND_S
from megatron_recycle.control.wire import GUEST
from megatron_recycle.control.write_ahead import Records, WriteAhead
from megatron_recycle.membership import commands, messages
from megatron_recycle.membership.decisions import End, Improve
from megatron_recycle.membership.extension import IN_FORCE
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.inputs import (
    Ending,
    Exited,
    FromLauncher,
    FromWorker,
    Hello,
    Hinted,
    Input,
    Interrupted,
    Loss,
    Lost,
    Raised,
    Restarted,
    StaysOut,
    WorkerHello,
)
from megatron_recycle.membership.next_life import JobLife
from megatron_recycle.membership.open_positions import Offered, Reservations, free_places, promised_before
from megatron_recycle.membership.protocol import (
    EventTold,
    Explains,
    Heartbeat,
    Interrupt,
    Join,
    LoggingRank,
    LogsNow,
    Measured,
    Order,
    Said,
    Stacks,
)
from megatron_recycle.membership.state import Member, Phase, State

Measure = Callable[[State, Member, Measured], "Conclusions | None"]
"""(state, member, measured message) -> its consequences; called in the event loop."""

_INPUTS = get_args(Input)
_GLANCE = 0.1
"""Seconds between checks that this coordinator still leads."""

log = logging.getLogger(__name__)


class Coordinator:
    """Decides who is in, for one job.

    Args:
        size: number of workers.
        token: the job's token.
        journal: the store of decisions.
        plans: the planner (this class does not know it).
        measure: takes workers' measurements; None: they are dropped.
        emit: gets every event, see observe.events; called in the event loop.
        listener: a socket that listens already; without one, any free port of 127.0.0.1.
        launched: whether launchers report exits. If not, the end of a worker's connection is its exit.
        offered: facts for a joining host; None: no host can join.
        state: the result of `records.restore` after a coordinator restart.
        told: events emitted by the previous coordinator.
        host: this coordinator's host, as workers there name it.
        life: the present life of the job.
        store: the content of torch's store.
        follows: whether another coordinator has led the job before, whose store its processes may have written to.
        before: the number of the host whose coordinator has led before, if its lease has ended.
        leads: whether no other coordinator can lead yet; inputs are queued while that is uncertain.
    """

    def __init__(
        self,
        *,
        size: int,
        token: str,
        journal: Records,
        plans: Plans,
        measure: Measure | None = None,
        emit: Callable[[Mapping[str, Any]], None],
        timeouts: Timeouts | None = None,
        listener: socket.socket | None = None,
        launched: bool = True,
        state: State | None = None,
        offered: Offered | None = None,
        told: Iterable[Mapping[str, Any]] = (),
        host: str = "",
        life: JobLife = JobLife(),  # noqa: B008 - it is immutable
        store: RendezvousStore | None = None,
        follows: bool = False,
        before: str = "",
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        timeouts = timeouts or Timeouts()
        state = (State(size=size) if state is None else state).with_(host=host, shape=life.shape)
        memory = WriteAhead(journal)
        self.server = Server(size, token, timeouts.hello_timeout, self, store)
        self._listener = listener
        self._launched = launched
        self._measure = measure
        self._emit = emit
        self._places = None if offered is None else Reservations(offered)
        self._event_feed = EventFeed(emit, self.server, told)
        self._operators = Operators(self.server, self._event_feed, self.feed)
        self._clocks = Clocks(timeouts, self.feed, lambda: self.state)
        self._searches = Searches(plans, self.feed, lambda: self.state)
        self._executor = AsyncioExecutor(self.server, self._clocks, self._searches, self._event_feed, memory, state,
                                        life.restarts)
        self._leader = Leader(state, memory, self._executor)
        self._follows = follows
        self._before = before
        self._leads = leads
        self._undecided: list[Input] = []
        self._closed = False

    @property
    def state(self) -> State:
        """The job's present state."""
        return self._leader.state

    @property
    def progress(self) -> Mapping[str, Any]:
        """The last report of each process about its training thread, by incarnation."""
        return self._event_feed.progress

    # Life

    async def start(self) -> str:
        """Listen; returns "host:port"."""
        address = await self.server.start(self._listener)
        if self.state.ended is not None:
            self._executor.end(End(*self.state.ended))
        elif self.state.phase is not Phase.FORMING:  # members have a heartbeat timeout to reconnect
            self._clocks.new_generation(self.state)
            if self._before:
                self._clocks.follow(self._before)
        self._clocks.start()
        if self._follows:
            self._gather()
            if self._places is not None:
                self._places.asked_from = time.monotonic() + FOUND_S
        if self.state.phase is Phase.RETURNING:
            self.feed(Restarted())
        return address

    def _gather(self) -> None:
        """The store waits for its processes' knowledge, no longer than it takes to declare a process out."""
        state, store = self.state, self.server.store
        store.gather([one.rank for one in state.members.values()] or range(state.size))
        asyncio.get_running_loop().call_later(self._clocks.timeouts.detection, store.gathered)

    async def wait_ended(self) -> End:
        """Wait for the end of the job, and return it. Raises LeadLost if another coordinator leads it to its end."""
        return await self._executor.ended

    async def wait_quiet(self, linger: float | None) -> None:
        """Wait until all connections have ended, at most `linger` seconds (None: no limit). After another coordinator,
        launchers may still be reconnecting: they have as long as members have."""
        if self._follows and self._launched:
            hosts = {member.host for member in self.state.members.values()}
            await self.server.wait_launchers(hosts, self._clocks.timeouts.detection)
        await self.server.wait_quiet(linger)

    async def close(self) -> None:
        """Stop serving; nothing is decided afterwards."""
        self._closed = True
        self._clocks.stop()
        self._searches.cancel()
        await self.server.close()
        self._leader.memory.close()

    def feed(self, happened: Input) -> None:
        """Decide on this input and carry the decisions out; call it in the event loop. After a standstill a coordinator
        must first know whether it still leads: not all its messages follow a write to the journal."""
        if self._closed:
            return
        if self._undecided or not self._leads():
            if not self._undecided:
                asyncio.get_running_loop().call_later(_GLANCE, self._decide_later)
            self._undecided.append(happened)
            return
        try:
            self._leader.feed(happened)
        except JournalError as lost:
            self.deposed(str(lost))

    def _decide_later(self) -> None:
        if not self._closed and not self._leads():
            asyncio.get_running_loop().call_later(_GLANCE, self._decide_later)
            return
        waiting, self._undecided = self._undecided, []
        for happened in waiting:
            self.feed(happened)

    def deposed(self, why: str) -> None:
        """Another coordinator leads, or may: no more decisions are made here. Call it in the event loop; `wait_ended`
        raises LeadLost."""
        if not self._closed:
            self._closed = True
            self._clocks.stop()
            if not self._executor.ended.done():
                self._executor.ended.set_exception(LeadLost(why))

    def search_again(self) -> None:
        """Look for a better plan for the membership in force: the planner's measurements have changed."""
        state = self.state
        if state.phase is Phase.TRAINING and state.round.plan is not None:
            self._executor.improve(Improve(state.generation, state.failed, state.latest or state.round.plan))
            for search in (one for each in IN_FORCE for one in each.seek(state)):
                carry_out(self._executor, search)

    # Inputs (called by the server)

    def worker_came(self, message: WorkerHello) -> None:
        incarnation, now = message.incarnation, time.monotonic()
        if incarnation.startswith(GUEST) and self.state.phase is Phase.FORMING:
            text = "with the secret of hosts that join nobody begins a job: give the job's token"
            self.server.tell(messages.end((incarnation,), 1, text))
            return
        if self._places is not None:
            self._places.taken(message.worker)
        self._clocks.watch.came(incarnation)
        self._clocks.watch.beat(incarnation, now)
        self.feed(Hello(message.member, message.generation))

    def worker_gone(self, incarnation: str) -> None:
        self._clocks.watch.hung_up(incarnation, time.monotonic())
        if not self._launched:
            self._vanished(incarnation, time.time())

    def from_worker(self, incarnation: str, message: FromWorker) -> None:
        now = time.monotonic()
        self._clocks.watch.beat(incarnation, now)
        if isinstance(message, Heartbeat):
            self._event_feed.progress[incarnation] = message.progress
            self._clocks.watch.told(incarnation, message.progress, now)
        elif isinstance(message, Said):
            self._event_feed.passed_on(incarnation, message.said, self.state)
        elif isinstance(message, Stacks):
            if (member := self.state.known.get(incarnation)) is not None:
                self._operators.stacks(member, message)
        elif isinstance(message, LogsNow):
            self._logs_now(incarnation, message.offset)
        elif isinstance(message, Measured):
            self._measured(incarnation, message)
        elif isinstance(message, Ending) and message.fault is None:
            self._vanished(incarnation, message.since)
        elif (happened := input_of(message)) is not None:
            if isinstance(happened, Hinted):
                self._event_feed.hint(happened, self.state)
            self.feed(happened)

    def launcher_came(self, connection: Connection, host: str, joins: Sequence[int]) -> None:
        self._clocks.watch.launcher_came(host)
        if self._places is not None:
            promised_before(self.state, self._places, joins, time.monotonic())
        for event in self._event_feed.again():
            connection.send(EventTold(event))
        for command in commands.in_force(self.state, host):
            connection.send(command.message)
        if self._executor.last_word is not None:
            connection.send(self._executor.last_word)
        self._clocks.watch.launcher_beat(host, time.monotonic())

    def launcher_gone(self, host: str) -> None:
        self._clocks.watch.launcher_hung_up(host, time.monotonic())

    def from_launcher(self, connection: Connection, host: str, message: FromLauncher) -> None:
        if isinstance(message, (Exited, StaysOut, Explains)):
            pid = None if isinstance(message, StaysOut) else message.pid
            if connection.guest and not of_guests(self.state, message.rank, pid):
                log.warning("recycle: %r, which has joined, speaks of rank %d, which is not its own", host,
                            message.rank)
            elif isinstance(message, Explains):
                self._event_feed.explained(message, self.state)
            else:
                self.feed(message)
        elif isinstance(message, Join):
            connection.send(free_places(self.state, self._places, message.count, time.monotonic(), host,
                                        self._event_feed.failures))
        elif isinstance(message, Interrupt):
            handled = message.handled or self._event_feed.handled(self.state)
            self.feed(Interrupted(message.status, message.message, handled=handled))
        self._clocks.watch.launcher_beat(host, time.monotonic())

    def from_operator(self, connection: Connection, message: Order) -> None:
        self._operators.asked(connection, message, self.state)

    def operator_gone(self, connection: Connection) -> None:
        self._operators.gone(connection)

    def refused(self, source: str, reason: str) -> None:
        self._emit({"event": "refused", "t": time.time(), "source": source, "reason": reason})

    def _vanished(self, incarnation: str, since: float) -> None:
        """A process is about to end, or has: without a launcher the end of its connection is the end of the process."""
        member = self.state.known.get(incarnation)
        if member is not None and incarnation not in self.state.absent.fenced:
            log = f"worker-{member.rank}.log in the run's folder" if self._launched else ""
            self.feed(Exited(member.rank, member.pid, None, since, log))

    def _logs_now(self, incarnation: str, offset: int) -> None:
        """This process is the logging rank from now on."""
        if (member := self.state.known.get(incarnation)) is not None:
            self.server.tell_launchers(LoggingRank(member.rank, member.pid, offset))

    def _measured(self, incarnation: str, message: Measured) -> None:
        """Costs for the planner; slow workers are reported, or declared out if the user asks for it."""
        member = self.state.member(incarnation)
        if self._measure is None or member is None:
            return
        try:
            found = self._measure(self.state, member, message)
        except Exception:  # it would cost the connection that sent them; without them plans are only slower
            log.exception("recycle: the measurements of worker %s are of no use", member.worker)
            return
        if found is None:
            return
        for known in filter(None, (found.profiled, found.spent)):
            self._emit(known)
        for name in found.out:
            if (slow := self.state.members.get(name)) is not None:
                self.feed(Lost((Loss(slow.incarnation, FailureKind.SLOW),), time.time()))
        for event in found.slow:
            self._event_feed.event(event, self.state)
        if found.profiled is not None:
            self.search_again()


def input_of(message: FromWorker) -> Input | None:
    """The input in a message; None for messages that change no state: heartbeats, events, measurements, an end without
    an error."""
    if isinstance(message, WorkerHello):
        return Hello(message.member, message.generation)
    if isinstance(message, Ending):
        return None if message.fault is None else Raised(message.incarnation, message.fault, message.since)
    return message if isinstance(message, _INPUTS) else None
