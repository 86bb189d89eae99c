"""`recycle profile RUN`: where the time of a running or ended job's iterations goes, worker by worker.

Every 25 iterations the coordinator records each worker's activities in the latest 12 (event `spent`): the parts of a
row add up to an iteration. Below is the plan's time with the costs measured in them, if it was in force in all 12.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from megatron_recycle.errors import ConfigError
from megatron_recycle.observe.events import read_events
from megatron_recycle.plan import Costs, Plan, PlanError, Worker, replay
from megatron_recycle.tools.operate.job_history import JobHistory
from megatron_recycle.tools.operate.runs import EVENTS, add_run, folder_of, reading

PARTS = {"actions": "forwards, backwards and weight gradients themselves",
         "full backwards": "backwards with both gradients in one",
         "between": "this plugin's and Python's time between two actions, reading data",
         "messages": "waiting for activations and gradients of other stages: the schedule's idle time",
         "reduction": "waiting for the stage's gradient: for the last of its workers, and for the transfer",
         "verdict": "waiting for the commit of the iteration before, the loss, gradient norms",
         "own": "the optimizer's step, and what is done once an iteration",
         "script": "the script's and the framework's own code between iterations",
         "other": "recoveries, boundaries, checkpoints, evaluations"}
"""Parts of an iteration, with their meaning."""
_LATEST = 12
"""Iterations in a breakdown."""


@dataclass(frozen=True)
class Breakdown:
    """One event `spent`.

    Attributes:
        iteration: its last iteration.
        seconds: worker -> part -> seconds of an iteration, the mean.
        costs: measured in them, in microseconds.
        planned: seconds of an iteration of the plan in force with those costs; None: its file is not there.
        since: the first iteration of that plan.
    """

    iteration: int
    seconds: Mapping[Worker, Mapping[str, float]]
    costs: Costs
    planned: float | None
    since: int = 0

    @property
    def measured(self) -> float:
        """Seconds of an iteration."""
        return mean(sum(parts.values()) for parts in self.seconds.values())


def breakdowns(folder: Path) -> list[Breakdown]:
    """All breakdowns of the run in ``folder``. Raises ConfigError."""
    found, seen, since = [], JobHistory(), 0
    with reading(folder / EVENTS):
        for event in read_events(folder / EVENTS):
            seen.add(event)
            if event["event"] in ("resumed", "adopted"):
                since = event.get("iteration", since)
            elif event["event"] == "spent" and "seconds" in event:
                costs = Costs.from_json(event.get("costs"))
                found.append(Breakdown(event["iteration"],
                                       {Worker.parse(name): parts for name, parts in event["seconds"].items()},
                                       costs, planned_seconds(folder, seen.digest, costs), since))
    return found


def plan_of(folder: Path, digest: str) -> Plan:
    """The plan with this digest of the run in ``folder`` (`control.plan_folder`). Raises PlanError."""
    return Plan.load(folder / "plans" / f"{digest.rpartition(':')[2][:16]}.json")


def planned_seconds(folder: Path, digest: str, costs: Costs) -> float | None:
    """Seconds of an iteration of the plan with this digest, with other costs; None: its file is not there."""
    try:
        plan = plan_of(folder, digest)
    except PlanError:
        return None
    again = replace(plan, problem=replace(plan.problem, costs=costs.by_chunk(plan.problem.placement)))
    return replay(again).period / 1e6


def rows(breakdown: Breakdown) -> dict[str, dict[str, float]]:
    """A row for each worker and one for their mean: milliseconds of an iteration and of its parts, by their names."""
    every = {str(worker): parts for worker, parts in sorted(breakdown.seconds.items())}
    every["mean"] = {part: mean(parts.get(part, 0.0) for parts in every.values()) for part in PARTS}
    return {name: {"iteration": 1000 * sum(parts.values()), **{part: 1000 * parts.get(part, 0.0) for part in PARTS}}
            for name, parts in every.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle profile`."""
    add_run(parser)
    parser.add_argument("--all", action="store_true", help="every breakdown, instead of the last one")


def run(args: argparse.Namespace) -> int:
    """Print and return 0. Raises ConfigError."""
    folder = folder_of(args.run)
    found = breakdowns(folder)
    if not found:
        raise ConfigError(f"{folder}: no event `spent` is in it; a job tells of its time after 16 iterations, and "
                          "then every 25")
    for breakdown in found if args.all else found[-1:]:
        show(breakdown)
    return 0


def show(breakdown: Breakdown) -> None:
    """Print one breakdown."""
    found = rows(breakdown)
    used = [part for part in PARTS if any(row[part] >= 0.05 for row in found.values())]
    widths = {title: max(11, len(title) + 2) for title in ("iteration", *used)}
    print(f"after iteration {breakdown.iteration}: milliseconds of an iteration, mean of the latest 12")
    print(f"{'worker':8}" + "".join(f"{title:>{width}}" for title, width in widths.items()))
    for name, row in found.items():
        print(f"{name:8}" + "".join(f"{row[title]:>{width}.1f}" for title, width in widths.items()))
    for part in used:
        print(f"{part}: {PARTS[part]}")
    costs = breakdown.costs
    chunks = "chunk of the model" if len(costs.forward) > len(costs.step) else "stage"
    print(f"costs of the plan, ms by {chunks}: F {_of(costs.forward)}, B {_of(costs.backward_input)}, "
          f"W {_of(costs.backward_weight)}, step {_of(costs.step)}, a transfer {costs.hop / 1000:.1f}")
    if breakdown.since > breakdown.iteration - _LATEST + 1:
        print(f"an iteration takes {breakdown.measured:.3f} s; the plan has changed with iteration "
              f"{breakdown.since}, so that these are of two plans: not compared")
    elif breakdown.planned is not None:
        off = 100 * (breakdown.planned / breakdown.measured - 1)
        print(f"an iteration takes {breakdown.measured:.3f} s; the plan with these costs {breakdown.planned:.3f} s "
              f"({off:+.1f} %)")


def _of(row: Sequence[int]) -> str:
    return " ".join(f"{value / 1000:.1f}" for value in row)
