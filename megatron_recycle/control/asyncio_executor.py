"""The coordinator's own executor: sockets, an event loop's timers, and threads for the planner."""

from __future__ import annotations

import asyncio

from megatron_recycle.control.clocks import Clocks
from megatron_recycle.control.event_feed import EventFeed
from megatron_recycle.control.searches import Searches
from megatron_recycle.control.server import Server
from megatron_recycle.control.write_ahead import WriteAhead
from megatron_recycle.membership import decisions as do
from megatron_recycle.membership.inputs import EndLate, NoLoss, PlaceLate, ReportsLate, SavedLate
from megatron_recycle.membership.next_life import NextLife, Shape, node_of, plan_life
from megatron_recycle.membership.open_positions import failed_too_often, plain
from megatron_recycle.membership.protocol import End
from megatron_recycle.membership.state import State


class AsyncioExecutor:
    """An `Executor` in the running event loop. It never waits: writes are buffered, and a peer that does not read is
    disconnected. Decisions that a part of the coordinator carries out unchanged are methods of that part."""

    def __init__(self, server: Server, clocks: Clocks, searches: Searches, event_feed: EventFeed, memory: WriteAhead,
                 state: State, restarts: bool) -> None:
        self._ended: asyncio.Future[do.End] | None = None
        self.last_word: End | None = None
        self.note, self.tell = memory.note, server.tell
        self.make_plan, self.make_redo = searches.make_plan, searches.make_redo
        self.improve, self.find_moves = searches.improve, searches.find_moves
        self._server = server
        self._clocks = clocks
        self._searches = searches
        self._event_feed = event_feed
        self._state = state
        self._restarts = restarts

    @property
    def ended(self) -> asyncio.Future[do.End]:
        """The end of the job, once it is there."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def follow(self, before: State, after: State) -> None:
        self._state = after
        if after.generation != before.generation:
            self._searches.cancel()
            self._clocks.new_generation(after)
            self._server.store.forget(after.generation - 2)
        elif (after.arrivals.joiners, after.absent.stranded) != (before.arrivals.joiners, before.absent.stranded):
            self._clocks.watch_all(after)

    def command(self, decision: do.Command) -> None:
        self._server.tell_launchers(decision.message)

    def emit(self, decision: do.Emit) -> None:
        self._event_feed.event(decision.event, self._state)

    def await_reports(self, decision: do.Await) -> None:
        self._clocks.after(self._clocks.timeouts.report_timeout, ReportsLate(decision.generation))

    def await_loss(self, decision: do.AwaitLoss) -> None:
        self._clocks.after(self._clocks.timeouts.detection, NoLoss(decision.generation, decision.since))

    def await_place(self, decision: do.AwaitPlace) -> None:
        self._clocks.after(self._clocks.timeouts.start_timeout, PlaceLate(decision.generation, decision.move))

    def await_saved(self, decision: do.AwaitSaved) -> None:
        limit = self._clocks.timeouts.save_timeout if decision.limit is None else decision.limit
        self._clocks.after(limit, SavedLate(decision.generation))

    def await_end(self, decision: do.AwaitEnd) -> None:
        self._clocks.after(decision.seconds, EndLate())

    def end(self, decision: do.End) -> None:
        """The end of the job. Before a restart of the script the server stops listening: only the next one is found."""
        self._searches.cancel()
        members, finished = self._state.members.keys(), self._state.round.finished
        message, life = decision.message, None
        if decision.again and self._restarts:
            following = self._next_life()
            if isinstance(following, str):
                message += f" It cannot be started again: {following}."
            else:
                self._server.stop_listening()
                life = following
        well = bool(decision.status and members and members <= finished)
        self.last_word = End(decision.status, message, well, life)
        self._server.tell_launchers(self.last_word)
        if not self.ended.done():
            self.ended.set_result(decision)

    def _next_life(self) -> NextLife | str:
        """The next life, on the hosts of all live launchers. A launcher silent for the heartbeat timeout, while others
        were heard, does not count."""
        last_received = {connection: connection.heard for connection in self._server.launchers}
        late = max(last_received.values(), default=0.0) - self._clocks.timeouts.heartbeat_timeout
        places = {str(one.host): one.places for one, moment in last_received.items() if one.places and moment > late}
        before = self._state.shape
        shape = before if self._state.description is None else Shape.of(self._state.description)
        places = dict(sorted(places.items(), key=lambda item: node_of(item[0])))
        bad = failed_too_often(self._state, self._event_feed.failures)
        good = {host: 0 if plain(host) in bad else count for host, count in places.items()}
        following = plan_life(good, shape, self._state.size)
        return plan_life(places, shape, self._state.size) if isinstance(following, str) else following
