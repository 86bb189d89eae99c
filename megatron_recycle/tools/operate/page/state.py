"""Content of a job's page, as JSON: its status, its latest iterations, its latest events, the schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_recycle.observe.events import format_event
from megatron_recycle.observe.rolling import TICKS
from megatron_recycle.plan import PlanError, replay
from megatron_recycle.tools.operate.job_history import Event, JobHistory
from megatron_recycle.tools.operate.outlook import Facts, judge
from megatron_recycle.tools.operate.status import plan_seconds, to_json
from megatron_recycle.tools.profile import plan_of
from megatron_recycle.tools.timeline import boxes

_ITERATIONS, _EVENTS, _MARKS = 600, 200, 200
_ROWS = 64
"""Most workers for which a schedule shows all pipelines at once."""
_MARKED = {"suspected": "lost", "joined": "joined", "restored": "went back", "restarted": "coordinator restarted",
           "last_copy": "last copy", "adopted": "better plan"}
"""Events that are marked over the iterations, and their labels."""


class History:
    """Recent history of a job. Add each event, with the summary after it."""

    def __init__(self) -> None:
        self.iterations: deque[tuple[float, int, float]] = deque(maxlen=_ITERATIONS)
        """Commit time, number, and seconds since the commit before, of each iteration."""
        self.marks: deque[Mapping[str, Any]] = deque(maxlen=_MARKS)
        self.lines: deque[Mapping[str, Any]] = deque(maxlen=_EVENTS)
        self.planned: tuple[Any, float | None] = (None, None)
        """Cached seconds of an iteration of the plan in force, after their cache key: they are costly to find."""
        self._count = 0
        self._before: float | None = None

    def add(self, event: Event, seen: JobHistory) -> None:
        """Take in the next event."""
        name, moment = event["event"], float(event["t"])
        if name == "committed":
            if self._before is not None and moment > self._before:
                self.iterations.append((moment, event["iteration"], moment - self._before))
            self._before = moment
        if name == "suspected" and event.get("removed") is False:
            return
        if name in _MARKED:
            worker = f" {event['worker']}" if "worker" in event else ""
            kind = f" ({event['kind']})" if "kind" in event else ""
            self.marks.append({"t": moment, "event": name, "text": f"{_MARKED[name]}{worker}{kind}"})
        if name not in TICKS and name not in ("spent", "profiled", "stopped"):
            self._count += 1
            self.lines.append({"number": self._count, "t": moment, "event": name,
                               "text": format_event(dict(event)).removeprefix(f"recycle: {name}").strip()})


def state(facts: Facts, history: History) -> dict[str, Any]:
    """All but the schedule. Times are Unix seconds, durations seconds."""
    seen = facts.seen
    key = (seen.digest, seen.spent.get("iteration"), seen.period)
    if history.planned[0] != key:
        history.planned = (key, plan_seconds(facts))
    repairs = list(dict.fromkeys(one.repair for one in seen.out.values() if one.repair))
    return {**to_json(facts, judge(facts), planned=history.planned[1]), "grid": list(seen.grid),
            "digest": seen.digest, "drain": repairs, "iterations": [*history.iterations],
            "marks": [*history.marks], "events": [*history.lines]}


def schedule(folder: Path, digest: str, pipeline: int | None) -> dict[str, Any]:
    """The plan in force as boxes, of one ``pipeline`` where there are many workers; without ``rows`` if it cannot be
    read. Times are in the unit of the plan's costs."""
    try:
        return _drawn(folder, digest, pipeline)
    except (PlanError, OSError, ValueError) as error:
        return {"digest": digest, "why": f"the plan in force cannot be read: {error}"}


@lru_cache(maxsize=1)
def _drawn(folder: Path, digest: str, pipeline: int | None) -> dict[str, Any]:
    plan = plan_of(folder, digest)
    timeline = replay(plan)
    workers = plan.problem.grid.workers()
    if len(workers) > _ROWS:
        pipeline = pipeline or 0
        workers = tuple(worker for worker in workers if worker.pipeline == pipeline)
    else:
        pipeline = None
    row = {worker: number for number, worker in enumerate(workers)}
    failed = [row[worker] for worker in plan.problem.failed if worker in row]
    return {"digest": digest, "pipeline": pipeline, "pipelines": plan.problem.grid.pipelines,
            "rows": [str(worker) for worker in workers], "failed": failed, "makespan": timeline.makespan,
            "boxes": [[row[box.worker], box.kind, box.start, box.end, int(box.guest), box.text]
                      for box in boxes(plan, timeline) if box.worker in row]}
