#!/usr/bin/env python3
"""Whether the simulator is true: the emulated benchmark's job on real processes, through a scripted trace of kills.

    python scripts/bench/validate_simulator.py                    # 3x4x6 for 4 minutes
    python scripts/bench/validate_simulator.py --grid 4x4x8 --minutes 8 --unit 0.01

Stages sleep for 20, 22 and 18 units, so that real processes, engines, kills (SIGKILL), restarts (`max_restarts`) and
rejoins can be timed on few cores; see `emulated.py`. Two jobs are run. The first one has no failures, and trains until
it has told what its iterations are made of (event `spent`): the costs in it are what `recycle simulate --profile` takes
of any real job, sleepers that wake late, transfers and time between actions included. The second one is killed at as
scripted. The simulator gets the costs of the first, the stalls of the recovery benchmark (`policies.recycling.Stalls`,
or `--recovery`), and as its trace the moments at which workers were killed, in seconds after a commit, and at which
their replacements had built their model, as the events tell: how long a process starts is a property of the machine.
Nothing else is fitted. Both begin with the first commit; what counts is when the same iteration is committed. The
planner searches for nothing better meanwhile (`planner_budget` 0), and plans for the costs on paper, here as there.

For comparison the difference is also told with the costs as they are on paper, and with those that make an iteration
take as long as those before the first kill did: a machine may be busier in one job than in the other.

Prints both, writes runs/bench/validate_simulator.json, and ends with status 1 beyond 3 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from emulated import Shape  # beside this script
from jobs import Event, Job, JobFailed, exit_on_sigterm
from rich.console import Console
from rich.table import Table

from megatron_recycle.plan import Costs, Problem
from megatron_recycle.planner import plan_for, recosted
from megatron_recycle.tools.simulate.cluster import Cluster
from megatron_recycle.tools.simulate.cluster import changes as changes_of
from megatron_recycle.tools.simulate.job import Job as Simulated
from megatron_recycle.tools.simulate.plans import Figures, Plans
from megatron_recycle.tools.simulate.policies.base import Setting
from megatron_recycle.tools.simulate.policies.recycling import Stalls, WithoutMoves
from megatron_recycle.tools.simulate.run import Outcome, simulate
from megatron_recycle.tools.simulate.trace import Cleaning, Outage, checked

F, B, W = 20, 22, 18
LIMIT = 0.03
"""Largest difference of the throughput."""


def script(shape: Shape, seconds: float) -> list[tuple[float, str]]:
    """When who is killed: one alone, then two of different stages, then one of a stage that has been hit."""
    last, half = shape.stages - 1, shape.stages // 2
    shares = ((0.08, f"1:{half}"), (0.36, f"0:{last}"), (0.40, f"1:{half}"), (0.68, f"0:{half}"), (0.72, "1:0"))
    return [(share * seconds, worker) for share, worker in shares]


def measure(shape: Shape, unit: float, seconds: float, folder: Path) -> list[Event]:
    """The events of a job that is killed at as scripted, counted from its first commit; with 0 ``seconds``, of one
    without failures, until it has told of its time. Raises JobFailed."""
    arguments = ["--pipelines", shape.pipelines, "--stages", shape.stages, "--microbatches", shape.microbatches,
                 "--seconds", F * unit, B * unit, W * unit, "--iterations", 100_000, "--out", folder.resolve()]
    settings = {"costs": f"{F},{B},{W}", "cap": str(shape.cap), "planner_budget": "0", "heartbeat_timeout": "30",
                "max_restarts": "5"}
    folder.mkdir(parents=True, exist_ok=True)
    due, events, began = script(shape, seconds) if seconds else [], [], 0.0
    with Job("bench/emulated_stage.py", [str(value) for value in arguments], folder / "run",
             shape.pipelines * shape.stages, settings, 600 + 3 * seconds) as job:
        for event in job.events():
            events.append(event)
            if event["event"] == "spent" and not seconds:
                return events
            if event["event"] != "committed":
                continue
            began = began or event["t"]
            pace = event["t"] - next((one["t"] for one in reversed(events[:-1]) if one["event"] == "committed"), began)
            while due and due[0][0] + began < event["t"] + max(pace, 0.5):
                at, worker = due.pop(0)
                time.sleep(max(0.0, at + began - time.time()))
                events.append({"event": "killed", "worker": worker, "t": job.kill(worker)})
            if seconds and event["t"] > began + seconds:
                return events
    raise JobFailed(f"the job in {folder} ended before its time")


class AsGiven(Plans):
    """The plans of a job that is given its costs, as they take with other ones."""

    def _planned(self, problem: Problem) -> Figures:
        given = replace(problem, costs=Costs.uniform(problem.grid.stages, F, B, W))
        plan = recosted(problem, plan_for(given, None, work=0))
        return Figures(plan.period * self.job.unit, plan.makespan * self.job.unit)


def simulated(shape: Shape, costs: Costs, unit: float, events: Sequence[Event], stalls: Stalls) -> Outcome:
    """What the simulator makes of the same kills: each so many seconds after the same commit as in the real job, each
    replacement ready as long afterwards."""
    job = Simulated(shape.pipelines, shape.stages, shape.microbatches, costs, unit, cap=shape.cap)
    cluster, plans = Cluster(job.size, 1), AsGiven(job)
    numbers = {str(worker): place.host for worker, place in cluster.slots(job.pipelines, job.stages).items()}
    commits = [event["t"] for event in events if event["event"] == "committed"]
    duration = 2 * (commits[-1] - commits[0]) + 10 * plans.rerouted(()).makespan

    def through(outages: Sequence[Outage]) -> Outcome:
        trace = checked([f"host{number}" for number in range(job.size)], outages, duration, Cleaning())
        happened, _ = changes_of(trace, cluster)
        setting = Setting(job, cluster, plans, cluster.units(), duration)
        return simulate(WithoutMoves(stalls), setting, happened, duration, commits=True)

    found: list[Outage] = []
    for kill in (event for event in events if event["event"] == "killed"):
        before = max(index for index, at in enumerate(commits) if at < kill["t"])
        down = through(found).commits[before] + kill["t"] - commits[before]
        back = next((event["t"] for event in events if event["event"] == "waiting" and event["worker"] == kill["worker"]
                     and event["t"] > kill["t"]), float("inf"))
        found.append(Outage(down, down + back - kill["t"], f"host{numbers[kill['worker']]}"))
    return through(found)


def calibrated(events: Sequence[Event]) -> Costs:
    """The costs, in microseconds, that a job without failures has measured, as `recycle simulate --profile` takes
    them."""
    told = [event for event in events if event["event"] == "spent"][-1]
    return replace(Costs.from_json(told["costs"]), speed={})


def compare(shape: Shape, unit: float, costs: Costs, events: Sequence[Event], stalls: Stalls) -> dict[str, Any]:
    """Both, from the first commit to the last measured one; ``costs`` are in microseconds."""
    commits = [event["t"] for event in events if event["event"] == "committed"]
    outcome = simulated(shape, costs, 1e-6, events, stalls)
    last = len(commits) - 1
    measured, expected = commits[last] - commits[0], outcome.commits[last] - outcome.commits[0]
    kill = next(event["t"] for event in events if event["event"] == "killed")
    calm = [later - earlier for earlier, later in pairwise(at for at in commits if at < kill)]
    planned = outcome.commits[1] - outcome.commits[0]
    slow = median(calm) / planned
    again = simulated(shape, costs, 1e-6 * slow, events, stalls)
    paper = simulated(shape, Costs.uniform(shape.stages, F, B, W), unit, events, stalls)
    generations = sorted({event["generation"] for event in events if event["event"] == "decided"})
    return {"iterations": last, "measured_s": measured, "simulated_s": expected, "off": expected / measured - 1,
            "costs": costs.to_json(), "off_on_paper": (paper.commits[last] - paper.commits[0]) / measured - 1,
            "machine": slow, "off_machine_taken_out": (again.commits[last] - again.commits[0]) / measured - 1,
            "pace_measured_s": [round(later - earlier, 3) for earlier, later in pairwise(commits)],
            "pace_simulated_s": [round(later - earlier, 3) for earlier, later in pairwise(outcome.commits[:last + 1])],
            "kills": [(event["worker"], round(event["t"] - commits[0], 2)) for event in events
                      if event["event"] == "killed"],
            "generations": len(generations), "survived": outcome.survived}


def show(found: dict[str, Any], shape: Shape, unit: float, console: Console) -> None:
    table = Table(f"{shape}, units of {1000 * unit:g} ms", "measured", "simulated", "off")
    for name, measured, expected in (
        (f"{found['iterations']} iterations, s", found["measured_s"], found["simulated_s"]),
        ("samples per second", *(shape.pipelines * shape.microbatches * found["iterations"] / found[key]
                                 for key in ("measured_s", "simulated_s"))),
        ("an iteration, median, s", median(found["pace_measured_s"]), median(found["pace_simulated_s"])),
        ("the longest, s", max(found["pace_measured_s"]), max(found["pace_simulated_s"])),
    ):
        table.add_row(name, f"{measured:.2f}", f"{expected:.2f}", f"{100 * (expected / measured - 1):+.2f} %")
    console.print(table)
    slower, off = found["machine"], 100 * found["off_machine_taken_out"]
    console.print(f"Costs as on paper: {100 * found['off_on_paper']:+.2f} % off.")
    console.print(f"Before the first kill iterations took {slower:.3f} times as long as the first job's costs say; with"
                  f" that taken out: {off:+.2f} % off.")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--grid", type=Shape.parse, default=Shape(3, 4, 6))
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--unit", type=float, default=0.005, help="seconds; longer ones hide what the machine adds")
    parser.add_argument("--recovery", type=Path, metavar="FILE", help="stalls, as scripts/bench/recovery.py wrote them")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/validate_simulator.json"))
    args = parser.parse_args()
    exit_on_sigterm()
    console = Console(width=None if sys.stdout.isatty() else 100)
    stalls = Stalls.measured(args.recovery) if args.recovery else Stalls()
    stalls = Stalls(stalls.exit, stalls.host, stalls.rejoin, start=0.0, save=0.0, save_every=1e9)
    load = os.getloadavg()[0]
    try:
        folder = args.output.with_suffix("")
        costs = calibrated(measure(args.grid, args.unit, 0, folder / "calibration"))
        events = measure(args.grid, args.unit, 60 * args.minutes, folder)
    except JobFailed as error:
        print(f"validate_simulator.py: {error}", file=sys.stderr)
        return 1
    found = compare(args.grid, args.unit, costs, events, stalls)
    loads = {"load_before": load, "load_after": os.getloadavg()[0], "processors": os.cpu_count()}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"grid": str(args.grid), "unit_seconds": args.unit, **loads, **found}, indent=1)
                           + "\n")
    show(found, args.grid, args.unit, console)
    print(f"load {loads['load_before']:.0f} to {loads['load_after']:.0f} on {os.cpu_count()} cores; every number is in"
          f" {args.output}")
    return 0 if abs(found["off"]) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
