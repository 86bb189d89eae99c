#!/usr/bin/env python3
"""How long a job stands still when a worker is killed, in the quickstart's grid: 3 pipelines x 2 stages.

    python scripts/bench/recovery.py            # 5 jobs, 4 kills in each

Each job loses four of its six workers, one after the other, at a random moment of an iteration; every position
is hit. The time counts from just before SIGKILL is sent to when the last survivor starts its first action of
the new generation. Prints a table and writes runs/bench/recovery.json with every kill's numbers.

The parts: detect (until the coordinator has recorded the suspicion), decide (until the new membership is
decided), stop (until every survivor stands still and has reported), plan (what is waited for the plan after that),
rebuild (until the last survivor has its new groups), reconcile (until the last one starts an action).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs import Event, Job, JobFailed, exit_on_sigterm

PIPELINES, STAGES, MICROBATCHES = 3, 2, 4
PARTS = ("detect", "decide", "stop", "plan", "rebuild", "reconcile")
FIRST, EVERY = 4, 5
"""Iteration of a job's first kill, and iterations between two kills."""


def orders(jobs: int, kills: int, rng: random.Random) -> list[list[str]]:
    """For each job whom to kill; a stage keeps its last worker, and positions take turns in being first."""
    workers = [f"{pipeline}:{stage}" for pipeline in range(PIPELINES) for stage in range(STAGES)]
    made = []
    for job in range(jobs):
        rest = rng.sample(workers, len(workers))
        rest.insert(0, rest.pop(rest.index(workers[job % len(workers)])))
        chosen: list[str] = []
        for worker in rest:
            if sum(other[-1] == worker[-1] for other in chosen) < PIPELINES - 1 and len(chosen) < kills:
                chosen.append(worker)
        made.append(chosen)
    return made


def run_job(args: argparse.Namespace, folder: Path, victims: Sequence[str], rng: random.Random) -> list[dict[str, Any]]:
    """One job that loses `victims`; their numbers."""
    iterations = FIRST + EVERY * len(victims)
    arguments = ["--iterations", str(iterations), "--stages", str(STAGES), "--microbatches", str(MICROBATCHES)]
    settings = {"reduction": args.reduction, "step": args.step}
    events: list[Event] = []
    sent: list[tuple[str, float]] = []
    with Job("gpt_deepspeed.py", arguments, folder, PIPELINES * STAGES, settings, args.limit) as job:
        for event in job.events():
            events.append(event)
            due = FIRST + EVERY * len(sent)
            if event["event"] == "committed" and len(sent) < len(victims) and event["iteration"] + 1 == due:
                times = [event["t"] for event in events if event["event"] == "committed"][-4:]
                shortest = min(after - before for before, after in pairwise(times))
                time.sleep(rng.uniform(0.05, 0.9) * shortest)
                victim = victims[len(sent)]
                sent.append((victim, job.kill(victim)))
        job.check_ended_well()
    return [measured(events, victim, moment) for victim, moment in sent]


def measured(events: Sequence[Event], victim: str, sent: float) -> dict[str, Any]:
    """The parts of one recovery, in milliseconds."""
    suspected = next(event for event in events if event["event"] == "suspected" and event["worker"] == victim)
    later = [event for event in events if event["t"] >= sent]
    resumed = next(event for event in later if event["event"] == "resumed")
    generation = resumed["generation"]
    of_it = [event for event in later if event["generation"] == generation]

    def at(name: str) -> float:
        return next(event["t"] for event in of_it if event["event"] == name)

    planned = next(event for event in of_it if event["event"] == "planned")
    rebuilt = max(event["t"] for event in of_it if event["event"] == "rebuilt" and event["t"] <= resumed["t"])
    ready = max(at("stopped"), planned["t"])
    moments = [sent, suspected["t"], at("decided"), at("stopped"), ready, rebuilt, resumed["t"]]
    parts = {part: round((after - before) * 1000, 2) for part, (before, after) in zip(PARTS, pairwise(moments))}
    return {
        "worker": victim,
        "survivors": resumed["survivors"],
        "iteration": resumed["iteration"],
        "action": (suspected.get("progress") or {}).get("action"),
        "total": round((resumed["t"] - sent) * 1000, 2),
        **parts,
        "plan_ms": planned["plan_ms"],
        "plan_source": planned["source"],
    }


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    console.print(f"{len(rows)} kills, milliseconds from SIGKILL to the last survivor's first action afterwards:")
    table = Table("", "median", "worst")
    for name in ("total", *PARTS):
        values = [row[name] for row in rows]
        style = "bold" if name == "total" else ""
        table.add_row(name, f"{statistics.median(values):.0f}", f"{max(values):.0f}", style=style)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--kills", type=int, default=4, choices=range(1, 5), help="in each job")
    parser.add_argument("--reduction", default="exact", choices=("exact", "fast"))
    parser.add_argument("--step", default="staggered", choices=("staggered", "barrier"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=180.0, metavar="SECONDS", help="for each job")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/recovery.json"))
    args = parser.parse_args()
    exit_on_sigterm()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    rng = random.Random(args.seed)
    output = args.output.absolute()
    rows: list[dict[str, Any]] = []
    load = os.getloadavg()[0]
    for number, victims in enumerate(orders(args.jobs, args.kills, rng)):
        console.print(f"job {number + 1} of {args.jobs}: {', '.join(victims)} will be killed")
        try:
            found = run_job(args, output.with_suffix("") / f"job-{number}", victims, rng)
        except JobFailed as error:
            print(f"recovery.py: {error}", file=sys.stderr)
            return 1
        rows += found
        console.print("  " + ", ".join(f"{row['worker']} {row['total']:.0f} ms" for row in found))
    record = {
        "grid": {"pipelines": PIPELINES, "stages": STAGES, "microbatches": MICROBATCHES},
        "reduction": args.reduction, "step": args.step, "seed": args.seed,
        "processors": os.cpu_count(), "load_before": load,
        "median_ms": statistics.median(row["total"] for row in rows), "worst_ms": max(row["total"] for row in rows),
        "kills": rows,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=2) + "\n")
    show(rows, console)
    print(f"median {record['median_ms']:.0f} ms, worst {record['worst_ms']:.0f} ms; every number in {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
