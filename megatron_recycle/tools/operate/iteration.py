"""One iteration of a job as its workers ran it, beside its plan: the content of `recycle timeline RUN`.

Workers record every 25th iteration, and those around a failure (`runtime.spans`).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_recycle.errors import ConfigError
from megatron_recycle.membership.names import in_order
from megatron_recycle.observe.events import read_events
from megatron_recycle.plan import Plan, PlanError, replay
from megatron_recycle.tools.operate.job_history import JobHistory
from megatron_recycle.tools.operate.runs import EVENTS, folder_of, reading
from megatron_recycle.tools.profile import plan_of

_TIMINGS = "timings"
_ACTION = re.compile(r"(F|B|W|FB)(\d+)\.(\d+)(?:/\d+)?\Z")
_STEP = ("reduce", "reduced", "step", "stepped", "S")
_SHOWN = 6
"""Iterations that a line names."""


@dataclass(frozen=True)
class Span:
    """``start`` and ``end`` in seconds since the iteration's first action. ``kind`` as a plan's action, or empty for a
    wait or any other activity, named by ``name``."""

    start: float
    end: float
    name: str
    kind: str = ""


@dataclass(frozen=True)
class Iteration:
    """Attributes:
        spans: of each process, by its name.
        plan: the plan in force; None: its file is not there.
        unit: seconds of a unit of the plan's costs; None: they were not measured then.
        generation: that it was committed in.
    """

    number: int
    spans: Mapping[str, Sequence[Span]]
    plan: Plan | None
    unit: float | None
    generation: int


def load(given: Path, wanted: int | None) -> Iteration:
    """The iteration ``wanted`` of the run ``given``; None: the latest that was recorded. Raises ConfigError."""
    folder = folder_of(given)
    records: dict[int, dict[str, Mapping[str, Any]]] = {}
    for path in sorted((folder / _TIMINGS).glob("worker-*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                one = json.loads(line)
                records.setdefault(int(one["iteration"]), {})[str(one["worker"])] = one
            except (KeyError, TypeError, ValueError):  # a line that is being written
                continue
    if not records:
        raise ConfigError(f"{folder} has no record of an iteration yet: workers write down every 25th, into "
                          f"{folder / _TIMINGS} (on a host with a run folder of its own, there)")
    if wanted is None:
        most = max(len(of) for of in records.values())
        wanted = max(number for number, of in records.items() if 2 * len(of) >= most)
    if wanted not in records:
        near = sorted(sorted(records, key=lambda number: abs(number - (wanted or 0)))[:_SHOWN])
        raise ConfigError(f"iteration {wanted} was not written down: workers write down every 25th, and those around a "
                          f"failure; there are {', '.join(map(str, near))}")
    digest, measured, generation = _in_force(folder, wanted)
    plan = None
    with contextlib.suppress(PlanError):
        plan = plan_of(folder, digest)
    found = records[wanted]
    begin = min(float(one["t"]) for one in found.values())
    spans = {name: [_span(float(found[name]["t"]) - begin, one) for one in found[name]["spans"]]
             for name in in_order(found)}
    first = min((span.start for of in spans.values() for span in of if span.kind), default=0.0)
    return Iteration(wanted, {name: [Span(one.start - first, one.end - first, one.name, one.kind) for one in of]
                              for name, of in spans.items()}, plan, 1e-6 if measured else None, generation)


def trace(found: Iteration) -> dict[str, Any]:
    """The iteration in the format of Perfetto and Chrome's tracing: a process for the plan and one for the recorded
    run, a thread for each worker; times in microseconds."""
    events: list[dict[str, Any]] = []

    def name_of(process: int, name: str, threads: Sequence[str]) -> None:
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        events.extend({"ph": "M", "pid": process, "tid": number, "name": "thread_name", "args": {"name": thread}}
                      for number, thread in enumerate(threads))

    if found.plan is not None:
        timeline, unit = replay(found.plan), 1e6 * (found.unit or scale(found))
        workers = sorted(found.plan.workers)
        name_of(1, f"plan of iteration {found.number}", [str(worker) for worker in workers])
        for number, worker in enumerate(workers):
            actions = found.plan.rest(worker)
            times = timeline.times[worker][found.plan.done.get(worker, 0):]
            events.extend({"ph": "X", "pid": 1, "tid": number, "cat": action.kind, "name": str(action),
                           "ts": unit * start, "dur": unit * (end - start)}
                          for action, (start, end) in zip(actions, times))
    name_of(2, f"iteration {found.number}", list(found.spans))
    for number, spans in enumerate(found.spans.values()):
        events.extend({"ph": "X", "pid": 2, "tid": number, "cat": one.kind or "other", "name": one.name,
                       "ts": 1e6 * one.start, "dur": 1e6 * (one.end - one.start)} for one in spans)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def scale(found: Iteration) -> float:
    """Seconds of a unit of the plan's costs with which the plan is as long as the recorded run."""
    assert found.plan is not None
    ends = [span.end for of in found.spans.values() for span in of if span.kind]
    return max(ends, default=1.0) / max(1, replay(found.plan).makespan)


def _span(offset: float, fields: Sequence[Any]) -> Span:
    begin, took, name = float(fields[0]) / 1e6, float(fields[1]) / 1e6, str(fields[2])
    match = _ACTION.match(name)
    kind = match[1] if match else "S" if name in _STEP else ""
    return Span(offset + begin, offset + begin + took, name, kind)


def _in_force(folder: Path, iteration: int) -> tuple[str, bool, int]:
    """The digest of the plan that an iteration was run by, whether its costs were measured, and the generation."""
    seen = JobHistory()
    with reading(folder / EVENTS):
        for event in read_events(folder / EVENTS):
            seen.add(event)
            if event["event"] == "committed" and event["iteration"] >= iteration:
                break
    return seen.digest, seen.period is not None, seen.generation
