"""The coordinator's clocks: detectors that tick, and limits of time that run out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_recycle.control.elected import LEASE_S
from megatron_recycle.control.sockets import FOUND_S
from megatron_recycle.control.watch import Watch
from megatron_recycle.membership.description import Job
from megatron_recycle.membership.inputs import Input, Interrupted, Loss, Lost, Stuck
from megatron_recycle.membership.state import Phase, State


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

    def overridden(self, job: Job) -> Timeouts:
        """These, with what the ``job`` says of them."""
        names = ("heartbeat_interval", "heartbeat_timeout", "report_timeout")
        return Timeouts(**{**vars(self), **{n: wanted for n in names if (wanted := getattr(job, n))}})


class Clocks:
    """All that happens because time passes, in an event loop.

    Args:
        feed: takes what has happened.
        state: of the job, now.
    """

    def __init__(self, timeouts: Timeouts, feed: Callable[[Input], None], state: Callable[[], State]) -> None:
        self.timeouts = timeouts
        self.watch = Watch(timeouts.heartbeat_interval, timeouts.heartbeat_timeout)
        self._feed = feed
        self._state = state
        self._stopped = False

    def start(self) -> None:
        """Tick from now on, in the running event loop."""
        asyncio.get_running_loop().call_later(self.timeouts.start_timeout, self._start_late)
        self._tick()

    def stop(self) -> None:
        """No further tick."""
        self._stopped = True

    def new_generation(self, state: State) -> None:
        """Watch exactly the processes of ``state``, with its own limits; what was told of their work is void."""
        if state.description is not None:
            self.timeouts = self.timeouts.overridden(state.description)
        self.watch_all(state)

    def watch_all(self, state: State) -> None:
        """Watch exactly the processes of ``state``."""
        others = (*state.arrivals.joiners.values(), *state.absent.stranded.values())
        interval, timeout = self.timeouts.heartbeat_interval, self.timeouts.heartbeat_timeout
        self.watch.members(state.members.values(), others, interval, timeout, time.monotonic())

    def follow(self, node: str) -> None:
        """The coordinator before this one was on the host of this number, and its lease has ended. If the host has gone
        with it, it has been silent for that long already, however little of that this one has seen."""
        since = min(LEASE_S, self.timeouts.heartbeat_timeout - FOUND_S)
        if since > 0:
            self.watch.left(node, time.monotonic() - since)

    def after(self, seconds: float, happened: Input) -> None:
        """Feed this in so many seconds."""
        asyncio.get_running_loop().call_later(seconds, self._feed, happened)

    def _tick(self) -> None:
        if self._stopped or self._state().phase is Phase.ENDED:
            return
        pace = min(0.5, max(0.05, self.timeouts.heartbeat_interval / 2))
        asyncio.get_running_loop().call_later(pace, self._tick)
        now = time.monotonic()
        found = self.watch.tick(now)
        since = time.time() - (now - found.since)
        if found.lost:
            self._feed(Lost(tuple(Loss(incarnation, kind) for incarnation, kind in found.lost.items()), since))
        elif found.waiting is not None:
            state = self._state()
            waiting = {state.known[key].worker: doing.what for key, doing in found.waiting.items()}
            self._feed(Stuck(state.generation, waiting, since))

    def _start_late(self) -> None:
        state = self._state()
        if state.phase is not Phase.FORMING:
            return
        ready = {member.rank for member in state.known.values() if member.worker in state.forming.descriptions}
        missing = ", ".join(str(rank) for rank in range(state.size) if rank not in ready)
        limit = f"{self.timeouts.start_timeout:.0f} s"
        self._feed(Interrupted(1, f"not ready within {limit}: rank {missing}; see their logs", again=True))
