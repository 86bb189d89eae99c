"""A coordinator in a thread of the test process, and what it has emitted so far."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_recycle.control import Agent, Coordinator, Journal, Timeouts
from megatron_recycle.control.searches import Plans
from megatron_recycle.membership.decisions import End
from megatron_recycle.membership.description import Description, Job
from megatron_recycle.plan.plan_file import PlanFile

TOKEN = "token"
GRID = {"stages": 2, "microbatches": [2, 2, 2]}
DESCRIPTION = Description.from_json({"grid": GRID, "block": 1, "reduction": "exact"})
LIMIT = 60.0
"""Seconds; every wait of these tests ends with an error after it."""


def fake_plan(job: Job, failed: frozenset[str]) -> PlanFile:
    return PlanFile(source="greedy", digest=f"sha256:{'-'.join(sorted(failed))}", failed=sorted(failed))


class Service:
    """`coordinator` runs in a loop of its own; `events` grows, and `await_event` waits for one."""

    def __init__(self, journal: Journal, **options: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.end: End | None = None
        self.address = ""
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        plans = Plans(options.pop("plan", fake_plan), options.pop("improve", None))
        settings = {"size": 6, "token": TOKEN, **options}
        self.coordinator = Coordinator(journal=journal, plans=plans, emit=self._emit, **settings)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _emit(self, event: Mapping[str, Any]) -> None:
        with self._changed:
            self.events.append(dict(event))
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        address = await self.coordinator.start()
        with self._changed:
            self.address = address
            self._changed.notify_all()
        await self._stop.wait()
        await self.coordinator.close()

    def start(self) -> Service:
        self._thread.start()
        self._until(lambda: bool(self.address), "its address")
        return self

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT)

    def call(self, work: Callable[..., Any], *args: Any) -> None:
        """Run `work` in the coordinator's event loop."""
        self._loop.call_soon_threadsafe(work, *args)

    def await_event(self, name: str, **fields: Any) -> dict[str, Any]:
        """The first event of this name with these fields, once it is there."""

        def matches(event: Mapping[str, Any]) -> bool:
            return event["event"] == name and all(event.get(key) == value for key, value in fields.items())

        self._until(lambda: any(map(matches, self.events)), f"{name} {fields}")
        return next(event for event in self.events if matches(event))

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + LIMIT
        with self._changed:
            while not reached():
                assert self._changed.wait(limit - time.monotonic()), f"no {what}; so far: {self.events}"


@contextmanager
def service(folder: Path, **options: Any) -> Iterator[Service]:
    """A running coordinator; nobody is missed for being slow, unless other timeouts are given."""
    options.setdefault("timeouts", Timeouts(heartbeat_interval=0.1, heartbeat_timeout=15.0, report_timeout=60.0))
    running = Service(Journal.create(folder / "journal.jsonl"), **options).start()
    try:
        yield running
    finally:
        running.stop()


def agent(address: str, worker: str, life: int = 0, **options: Any) -> Agent:
    """An agent of the 3 x 2 grid, started."""
    pipeline, stage = map(int, worker.split(":"))
    rank = pipeline * 2 + stage
    settings = {"heartbeat_interval": 0.1, "pid": 1000 + rank + 100 * life, "host": "test", **options}
    made = Agent(address, TOKEN, worker, rank, f"{worker}/{life}", **settings)
    made.start()
    return made
