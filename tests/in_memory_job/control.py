"""The coordinator of a job in memory: `tests.fakes.coordinator`, in a thread of its own and in real time.

Messages take a while, by a seed. A coordinator that dies is started again from its journal.
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
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from megatron_recycle.control.clocks import Timeouts
from megatron_recycle.control.planning import Planning
from megatron_recycle.control.searches import Plans
from megatron_recycle.membership import inputs
from megatron_recycle.membership.description import Job as Described
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.protocol import Start
from megatron_recycle.membership.state import Phase, State
from megatron_recycle.plan import Plan
from megatron_recycle.plan.plan_file import PlanFile
from tests.fakes.coordinator import InMemory, InMemoryLink

LIMITS = Timeouts(heartbeat_interval=0.0, heartbeat_timeout=0.5, report_timeout=10.0)
"""Reports count as late after 10 s, and a hint that no failure explains brings a new generation after 0.5 s."""


@functools.cache
def planned(job: str, failed: frozenset[str]) -> PlanFile:
    """Jobs of one shape ask for the same plans again and again."""
    return Planning().plan(Described.from_json(json.loads(job)), failed)


class Control:
    """A coordinator and its launchers, who see every process end at once.

    Args:
        size: number of workers.
        seed: of the time that messages take.
        slow: the share of messages that take a while.
        longest: seconds that they take at most.
        moves: members and the positions that they had better take, once those are empty.
    """

    def __init__(self, size: int, seed: int = 0, slow: float = 0.0, longest: float = 0.004,
                 moves: Mapping[str, str] = MappingProxyType({})) -> None:
        self.failure: BaseException | None = None
        self.start: Callable[[int], None] = lambda rank: None
        """Called with the rank of each process that the coordinator wants to be started."""
        self.changed = threading.Condition()
        self._size = size
        self._moves = moves
        self._draw, self._slow, self._longest = random.Random(seed), slow, longest
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._delays = Delays()
        self._obeyed = 0
        self._coordinator = self._led()
        self.thread = threading.Thread(target=self._serve, name="memory-control", daemon=True)
        self.thread.start()

    def _led(self, before: InMemory | None = None) -> InMemory:
        plans = Plans(_plan, moves=self._moves_of, redo=Planning().redo)
        return InMemory(self._size, plans, self.later, time.time, delay=self.delay, timeouts=LIMITS,
                        changed=self._notify, before=before)

    def _moves_of(self, job: Described, failed: frozenset[str]) -> dict[str, str]:
        return {mover: to for mover, to in self._moves.items() if to in failed and mover not in failed}

    @property
    def state(self) -> State:
        return self._coordinator.state

    @property
    def events(self) -> list[dict[str, Any]]:
        return self._coordinator.events

    def link(self, address: str, token: str, **options: Any) -> InMemoryLink:
        """Takes `control.link.Link`'s place."""
        return self._coordinator.link(address, token, **options)

    # ---- the thread

    def _serve(self) -> None:
        while (run := self._inbox.get()) is not None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001  (the job's test reports it)
                self.failure = error
                self._notify()

    def call(self, run: Callable[[], None], after: float = 0.0) -> None:
        """Run this in the coordinator's thread."""
        if after > 0:
            self._delays.at(time.monotonic() + after, lambda: self._inbox.put(run))
        else:
            self._inbox.put(run)

    def later(self, seconds: float, run: Callable[[], None]) -> None:
        self.call(run, seconds)

    def close(self) -> None:
        self._delays.close()
        self._inbox.put(None)

    def idle(self) -> bool:
        """Whether there is nothing to decide now."""
        looked = threading.Event()
        self.call(looked.set)
        return looked.wait(0.05)

    def delay(self) -> float:
        return self._draw.uniform(0, self._longest) if self._draw.random() < self._slow else 0.0

    def _notify(self) -> None:
        commands = self._coordinator.commands if hasattr(self, "_coordinator") else []
        new, self._obeyed = commands[self._obeyed:], len(commands)
        for command in new:
            if isinstance(command, Start):
                self.call(lambda rank=command.rank: self.start(rank))
        with self.changed:
            self.changed.notify_all()

    # ---- what happens

    def exited(self, rank: int, pid: int, status: int) -> None:
        """The launcher has seen this process end."""
        moment = time.time()
        self.call(lambda: self._exited(rank, pid, status, moment), after=self.delay())

    def _exited(self, rank: int, pid: int, status: int, moment: float) -> None:
        if self._coordinator.dead:  # the launcher tells the next one
            self.call(lambda: self._exited(rank, pid, status, moment), after=0.001)
        else:
            self._coordinator.feed(inputs.Exited(rank, pid, status, moment))

    def lost(self, *workers: str, kind: FailureKind = FailureKind.FROZEN) -> None:
        """A detector finds that these have failed, whatever they do."""
        def declare() -> None:
            members = self.state.members
            found = tuple(inputs.Loss(members[name].incarnation, kind) for name in workers if name in members)
            if found:
                self._coordinator.feed(inputs.Lost(found, time.time()))

        self.call(declare)

    def leave(self, *workers: str) -> None:
        """These ask to leave the job."""
        def ask() -> None:
            for name in workers:
                self._coordinator.feed(inputs.Leave(self.state.members[name].incarnation))

        self.call(ask)

    def improved(self, generation: int, plan: Plan) -> None:
        """A search has found a better plan."""
        self._coordinator.feed(inputs.Improved(generation, plan.to_file(), time.time()))

    def kill(self, absent: float = 0.0) -> None:
        """The coordinator's process dies; another one takes over ``absent`` seconds later, from the journal."""
        def die() -> None:
            if not self._coordinator.dead and self.state.phase is not Phase.ENDED:
                self._coordinator.die()
                self.call(self._come_back, absent)

        self.call(die)

    def _come_back(self) -> None:
        self._coordinator = self._led(self._coordinator)

    # ---- what a test waits for

    def wait_until(self, reached: Callable[[], Any], what: str, limit: float) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: reached() or self.failure, limit):
                raise AssertionError(f"waited in vain for {what}")
        if self.failure is not None:
            raise AssertionError("the coordinator has failed") from self.failure


def _plan(job: Described, failed: frozenset[str]) -> PlanFile:
    plan = planned(json.dumps(job.to_json(), sort_keys=True), failed)
    lend = [] if job.lending is None else job.lending.lend
    return replace(plan, stats={**plan.stats, "may lend": lend})  # for tests that lend by hand


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
