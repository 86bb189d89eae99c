"""What a failure costs in work: kills at random moments, with and without what survivors keep of the iteration.

Stages sleep instead of computing, as in `emulated.py`; processes, tensors between them and SIGKILL are real. In each
job one worker after the other is killed at a random moment of an iteration, and comes back before the next kill.

The time lost is that of two iterations, the one that the kill hits and the next one, which some workers may be in
already. It is counted in iterations, without the recovery itself (from the death to the first resumed action). Such
iterations also take longer because a worker is missing from the kill on, whatever survivors keep. So there are two
figures: the time beyond two iterations without failures, and the time that is lost, beyond two iterations that take
from the kill on what the plan with one worker fewer says. Both sides get the same kills.
Prints medians and worst values, the most that a worker keeps until a commit (messages and sums: its own figure, which
its memory budget goes by) and its process's largest resident size, and writes runs/bench/redo.json.

    scripts/bench/redo.py [--grid 3x4x6] [--seconds 5] [--kills 20] [--reduction fast] [--seed 0] [--message 1]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from emulated_rows import BACKENDS, B, F, Shape, W  # beside this script
from jobs import Event, Job, exit_on_sigterm
from rich.console import Console
from rich.table import Table

OUT = Path("runs/bench")
SIDES = {"kept": "auto", "begun anew": "none"}
"""Values of `keep_messages`."""
QUIET = 4
"""Iterations without a failure before each kill."""


@dataclass(frozen=True)
class Hit:
    """One kill: the iteration, the victim and the moment in it (a share of an iteration), the time ``beyond`` two
    iterations without failures and the time ``lost``, in iterations, the actions that survivors lost, and the
    milliseconds of the recovery."""

    iteration: int
    victim: str
    moment: float
    beyond: float
    lost: float
    redone: int
    recovery_ms: float


@dataclass
class Side:
    """A job with its kills; ``period``: median seconds of an iteration without failures; ``logged``: the most bytes of
    messages and sums that a worker keeps; ``resident``: the most bytes that a worker's process has had in memory."""

    name: str
    period: float
    logged: int
    resident: int
    hits: list[Hit]


def run(name: str, keep: str, shape: Shape, args: argparse.Namespace) -> Side:
    """One job. Raises JobFailed."""
    draw, unit = random.Random(args.seed), args.seconds / shape.theory
    iterations = (args.kills + 1) * 40
    folder = OUT / "redo" / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ["--pipelines", shape.pipelines, "--stages", shape.stages, "--microbatches", shape.microbatches,
                 "--seconds", F * unit, B * unit, W * unit, "--iterations", iterations, "--clipping", 0.0,
                 "--out", folder.resolve(), "--layers", 1, "--parameters", 64,
                 "--width", int(args.message * 2**18)]
    settings = {"costs": f"{F},{B},{W}", "planner_budget": "0", "keep_messages": keep, "reduction": args.reduction,
                "max_restarts": str(args.kills)}
    committed: dict[int, float] = {}
    kills: list[tuple[int, str, float]] = []
    recoveries: list[Event] = []
    redone: list[int] = []
    logged = resident = 0
    planned: list[float] = []  # what each plan says of an iteration
    figure = "makespan" if keep == "none" else "period"  # it waits for each commit
    whole: list[int] = []  # iterations of all workers
    whole_since = 0  # the iteration from which on all workers are there
    with Job(f"bench/{BACKENDS['deepspeed']}", [str(each) for each in arguments], folder / "run",
             shape.pipelines * shape.stages, settings, 120 + 3 * iterations * args.seconds) as job:
        for event in job.events():
            kind = event["event"]
            if kind == "committed":
                committed[event["iteration"]] = event["t"]
                if whole_since is not None and event["iteration"] > whole_since:
                    whole.append(event["iteration"])
                if whole_since is not None and event["iteration"] >= whole_since + QUIET:
                    if len(kills) == args.kills:
                        resident = max(map(peak, job.pids.values()))
                        break
                    victim, moment = draw.choice([f"{d}:{s}" for d in range(shape.pipelines)
                                                  for s in range(shape.stages)]), draw.random()
                    time.sleep(moment * (event["t"] - committed[event["iteration"] - 1]))
                    kills.append((event["iteration"] + 1, victim, moment))
                    job.kill(victim)
                    whole_since = None
            elif kind == "profiled":
                logged = max(logged, *(kept["log"] for kept in event["kept"].values()))
            elif kind == "planned":
                planned.append(event[figure])
            elif kind == "joined":
                whole_since = max(committed) + 2
            elif kind == "reconciled" and len(redone) < len(kills) and not event.get("joined"):
                redone.append(event["redone"])
            elif kind == "resumed" and len(recoveries) < len(kills):
                recoveries.append(event)
    period = statistics.median(committed[k] - committed[k - 1] for k in whole if k > 1)
    hits = []
    for (k, victim, moment), event, lost, plan in zip(kills, recoveries, redone, planned[1::2]):
        took = (committed[k + 1] - committed[k - 1] - event["ms"] / 1000) / period
        without = moment + (2 - moment) * plan / planned[0]  # what they had taken if nothing had been run twice
        hits.append(Hit(k, victim, round(moment, 3), round(took - 2, 3), round(took - without, 3), lost,
                        round(event["ms"], 1)))
    return Side(name, round(period, 3), logged, resident, hits)


def peak(pid: int) -> int:
    """The most bytes that a process has had in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--grid", type=Shape.parse, default=Shape.parse("3x4x6"))
    parser.add_argument("--seconds", type=float, default=5.0, help="of an iteration of 1F1B in theory")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--reduction", choices=("fast", "exact"), default="fast")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--message", type=float, default=1.0, help="MiB of a message between stages")
    parser.add_argument("--sides", default=",".join(SIDES), help="of these; default: both")
    args = parser.parse_args()
    exit_on_sigterm()
    sides = [run(name, SIDES[name], args.grid, args) for name in args.sides.split(",")]
    table = Table(title=f"{args.grid}, {args.kills} kills each, {args.reduction}, iterations of {sides[0].period:g} s, "
                        f"load {os.getloadavg()[0]:.0f}")
    for heading in ("", "iterations lost, median", "worst", "beyond a whole job, median", "worst",
                    "actions lost by survivors, median", "recovery ms, median", "iteration s", "kept MiB",
                    "resident MiB"):
        table.add_column(heading, justify="left" if not heading else "right")
    for side in sides:
        lost = [hit.lost for hit in side.hits]
        beyond = [hit.beyond for hit in side.hits]
        table.add_row(side.name, f"{statistics.median(lost):.2f}", f"{max(lost):.2f}",
                      f"{statistics.median(beyond):.2f}", f"{max(beyond):.2f}",
                      f"{statistics.median(hit.redone for hit in side.hits):g}",
                      f"{statistics.median(hit.recovery_ms for hit in side.hits):.0f}", f"{side.period:.2f}",
                      f"{side.logged / 2**20:.1f}", f"{side.resident / 2**20:.0f}")
    Console(width=150).print(table)
    (OUT / "redo.json").write_text(json.dumps({"grid": str(args.grid), "reduction": args.reduction,
                                               "message_mib": args.message,
                                               "sides": [asdict(side) for side in sides]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
