#!/usr/bin/env python3
"""The cost to the others when a worker comes back, in the quickstart's grid, 3 pipelines x 2 stages.

    python scripts/bench/rejoin.py               # 6 kills, each followed by a rejoin
    python scripts/bench/rejoin.py --width 768   # a larger state to copy

One worker after the other is killed; the launcher starts it again (`max_restarts`), and it joins. For each rejoin:
stall (from when the first worker waits at the boundary to the last one's next action), copy (of the stage's state,
with checksums), and how much longer than the median iteration of all workers the first one with it took. Prints a
table and writes runs/bench/rejoin.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs import Event, Job, JobFailed, exit_on_sigterm

PIPELINES, STAGES, MICROBATCHES = 3, 2, 4
SETTLED = 8
"""Iterations with all workers between a rejoin and the next kill."""
SHOWN = ("stall", "copy", "extra", "iteration")


def run_job(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The numbers of each rejoin of one job."""
    arguments = ["--iterations", "100000", "--stages", str(STAGES), "--microbatches", str(MICROBATCHES)]
    arguments += ["--width", str(args.width)]
    settings = {"reduction": args.reduction, "max_restarts": str(args.rejoins), "planner_budget": "0"}
    events: list[Event] = []
    victims = [f"{number % PIPELINES}:{number // PIPELINES % STAGES}" for number in range(args.rejoins)]
    killed, calm = 0, 0
    with Job("gpt_deepspeed.py", arguments, folder, PIPELINES * STAGES, settings, args.limit) as job:
        for event in job.events():
            events.append(event)
            if event["event"] == "joined":
                job.pids[event["worker"]], calm = event["pid"], 0
            elif event["event"] == "committed" and killed == sum(other["event"] == "joined" for other in events):
                calm += 1
                if calm > SETTLED and killed == len(victims):
                    break
                if calm > SETTLED:
                    job.kill(victims[killed])
                    killed += 1
        if calm <= SETTLED:
            raise JobFailed(f"the job in {folder} ended before its time")
    return [measured(events, event) for event in events if event["event"] == "joined"]


def measured(events: Sequence[Event], joined: Event) -> dict[str, Any]:
    """One rejoin, in milliseconds."""
    generation = joined["generation"]
    of_it = [event for event in events if event.get("generation") == generation]
    first = next(event["iteration"] for event in of_it if event["event"] == "reconciled")
    resumed = next(event["t"] for event in of_it if event["event"] == "resumed")
    began = joined["t"] - joined["ms"] / 1000
    at = {event["iteration"]: event["t"] for event in events if event["event"] == "committed"}
    usual = statistics.median(at[k] - at[k - 1] for k in range(first + 1, first + SETTLED - 1))
    return {
        "worker": joined["worker"],
        "iteration_number": first,
        "stall": round((resumed - began) * 1000, 1),
        "copy": joined["copy_ms"],
        "extra": round((at[first] - at[first - 1] - usual) * 1000, 1),
        "iteration": round(usual * 1000, 1),
        "bytes": joined["bytes"],
        "mb_per_s": joined["mb_per_s"],
    }


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    console.print(f"{len(rows)} rejoins, milliseconds: stall, copy of {rows[0]['bytes'] / 1e6:.1f} MB or so, extra "
                  "time of the first iteration, usual iteration")
    table = Table("", "median", "worst")
    for name in SHOWN:
        values = [row[name] for row in rows]
        table.add_row(name, f"{statistics.median(values):.0f}", f"{max(values):.0f}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rejoins", type=int, default=6)
    parser.add_argument("--width", type=int, default=96, help="of the model")
    parser.add_argument("--reduction", default="exact", choices=("exact", "fast"))
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for the job")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/rejoin.json"))
    args = parser.parse_args()
    exit_on_sigterm()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    output, load = args.output.absolute(), os.getloadavg()[0]
    try:
        rows = run_job(args, output.with_suffix(""))
    except JobFailed as error:
        print(f"rejoin.py: {error}", file=sys.stderr)
        return 1
    record = {"grid": {"pipelines": PIPELINES, "stages": STAGES, "microbatches": MICROBATCHES}, "width": args.width,
              "reduction": args.reduction, "processors": os.cpu_count(), "load_before": load, "rejoins": rows}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=2) + "\n")
    show(rows, console)
    stall, usual = (statistics.median(row[name] for row in rows) for name in ("stall", "iteration"))
    rate = statistics.median(row["mb_per_s"] for row in rows)
    print(f"median stall {stall:.0f} ms = {stall / usual:.2f} iterations, copied at {rate:.0f} MB/s; every number in "
          f"{args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
