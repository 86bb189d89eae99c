#!/usr/bin/env python3
"""How long a job stands still when something fails, in the quickstart's grid: 3 pipelines x 2 stages.

    python scripts/bench/recovery.py                       # workers killed: 5 jobs, 4 kills in each
    python scripts/bench/recovery.py --kind frozen --count 8
    python scripts/bench/recovery.py --kind all --count 20
    python scripts/bench/recovery.py --beside OLD          # and the same in another checkout, job by job in turns

Kinds: `exit` (SIGKILL), `frozen` (SIGSTOP), `unreachable` (a host's launcher and both of its workers killed together,
so that nobody reports their exits), `coordinator` (killed; training goes on meanwhile), `rejoin` (a killed worker is
started again and comes back; what counts is how long the others stand still for it).

Everything happens at a random moment of an iteration. A job loses up to four of its six workers, one after the other,
at most one host; every position is hit. The time counts from just before the signal to when the last survivor starts
its first action of the new generation. Prints a table for each kind and writes runs/bench/recovery.json with every
single one's numbers.

The parts: detect (until the coordinator has recorded the suspicion), decide (until the new membership is
decided), stop (until every survivor stands still and has reported), plan (what is waited for the plan after that),
rebuild (until the last survivor has its new groups), reconcile (until the last one starts an action).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
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

from megatron_recycle.tools.chaos.target_job import TargetJob

PIPELINES, STAGES, MICROBATCHES, HOSTS = 3, 2, 4, 3
PARTS = ("detect", "decide", "stop", "plan", "rebuild", "reconcile")
KINDS = ("exit", "frozen", "unreachable", "coordinator", "rejoin")
FIRST, EVERY = 4, 5
"""Iteration of a job's first failure, and iterations between two failures."""
_FOR_EVER = 100_000
Row = dict[str, Any]


def orders(count: int, most: int, rng: random.Random) -> list[list[str]]:
    """Victims of each job, `count` in all, `most` a job; a stage keeps its last worker, and positions take turns
    in being first."""
    workers = [f"{pipeline}:{stage}" for pipeline in range(PIPELINES) for stage in range(STAGES)]
    made: list[list[str]] = []
    while (left := count - sum(map(len, made))) > 0:
        rest = rng.sample(workers, len(workers))
        rest.insert(0, rest.pop(rest.index(workers[len(made) % len(workers)])))
        chosen: list[str] = []
        for worker in rest:
            if sum(other[-1] == worker[-1] for other in chosen) < PIPELINES - 1 and len(chosen) < min(most, left):
                chosen.append(worker)
        made.append(chosen)
    return made


def strike(kind: str, job: Job, victim: str) -> float:
    """Hit the victim; returns when (Unix seconds)."""
    if kind == "coordinator":
        target = TargetJob(job.run_dir)
        pid, moment = target.coordinator(), time.time()
        os.kill(pid, signal.SIGKILL)
        return moment
    if kind == "unreachable":
        return job.kill_host(HOSTS - 1)
    return job.kill(victim, signal.SIGSTOP if kind == "frozen" else signal.SIGKILL)


def run_job(kind: str, args: argparse.Namespace, folder: Path, victims: Sequence[str],
            rng: random.Random) -> list[Row]:
    """One job in which `victims` are hit; the numbers of each."""
    # How many iterations pass until somebody is back depends on how long a start takes.
    iterations = _FOR_EVER if kind == "rejoin" else FIRST + EVERY * len(victims)
    arguments = ["--iterations", str(iterations), "--stages", str(STAGES), "--microbatches", str(MICROBATCHES)]
    settings = {"reduction": args.reduction, "step": args.step, "heartbeat_timeout": str(args.heartbeat_timeout)}
    if kind == "rejoin":
        settings["max_restarts"] = str(len(victims))
    hosts = HOSTS if kind == "unreachable" else 1
    events: list[Event] = []
    sent: list[tuple[str, float]] = []
    with Job("gpt_deepspeed.py", arguments, folder, PIPELINES * STAGES, settings, args.limit, hosts) as job:
        due = FIRST
        for event in job.events():
            events.append(event)
            if event["event"] == "joined":
                due = event["iteration"] + EVERY
                if len(sent) == len(victims):
                    break  # and nobody waits for the end
            if event["event"] == "committed" and len(sent) < len(victims) and event["iteration"] + 1 == due:
                time.sleep(rng.uniform(0.05, 0.9) * pace(events))
                victim = victims[len(sent)]
                sent.append((victim, strike(kind, job, victim)))
                due = -1 if kind == "rejoin" else due + EVERY
        if kind != "rejoin":
            job.check_ended_well()
    return [measured(kind, events, victim, moment) for victim, moment in sent]


def pace(events: Sequence[Event]) -> float:
    """Seconds of the shortest of the last iterations."""
    times = [event["t"] for event in events if event["event"] == "committed"][-4:]
    return min(after - before for before, after in pairwise(times))


def measured(kind: str, events: Sequence[Event], victim: str, sent: float) -> Row:
    """The parts of one recovery, in milliseconds."""
    if kind == "coordinator":
        return around_restart(events, sent)
    if kind == "rejoin":
        return around_joining(events, victim, sent)
    gone = [event for event in events if event["event"] == "suspected" and event["t"] >= sent]
    gone = [event for event in gone if event.get("removed", True)]
    suspected = next((event for event in gone if event["worker"] == victim), gone[0])
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
        "total": round((resumed["t"] - sent) * 1000, 2),
        **parts,
        "worker": suspected["worker"],
        "kind": suspected["kind"],
        "survivors": resumed["survivors"],
        "iteration": resumed["iteration"],
        "action": (suspected.get("progress") or {}).get("action"),
        "plan_ms": planned["plan_ms"],
        "plan_source": planned["source"],
    }


def around_restart(events: Sequence[Event], sent: float) -> Row:
    """Until the coordinator is back, and what training lost: the longest time between two commits, less the usual."""
    back = next(event["t"] for event in events if event["event"] == "restarted" and event["t"] >= sent)
    # A new coordinator hears of commits only once it is back, so theirs are not told from this.
    decided = [event for event in events if event["event"] == "decided" and event["t"] >= sent]
    return {"total": round((back - sent) * 1000, 2), "generations": len(decided)}


def around_joining(events: Sequence[Event], victim: str, sent: float) -> Row:
    """How long the others stood still when somebody came back; and the start of the process."""
    joined = next(e for e in events if e["event"] == "joined" and e["worker"] == victim and e["t"] >= sent)
    gaps = [after["t"] - before["t"] for before, after in pairwise(e for e in events if e["event"] == "committed")]
    return {
        "total": joined["ms"],
        "copy": joined.get("copy_ms", 0.0),
        "an iteration": round(1000 * statistics.median(gaps), 2),
        "worker": victim,
        "back_after_s": round(joined["t"] - sent, 2),
        "mb_per_s": joined.get("mb_per_s"),
        "bytes": joined.get("bytes"),
    }


_TOLD = {
    "exit": "from SIGKILL to the last survivor's first action afterwards",
    "frozen": "from SIGSTOP to the last survivor's first action afterwards",
    "unreachable": "from a host's end to the last survivor's first action afterwards",
    "coordinator": "from SIGKILL until the coordinator is back; training goes on meanwhile",
    "rejoin": "that the others stood still for one that came back",
}


def show(kind: str, rows: Sequence[Row], console: Console) -> None:
    console.print(f"{kind}: {len(rows)}, milliseconds {_TOLD[kind]}:")
    table = Table("", "median", "worst")
    for name in ("total", *PARTS, "copy", "an iteration"):
        values = [row[name] for row in rows if name in row]
        if values:
            style = "bold" if name == "total" else ""
            table.add_row(name, f"{statistics.median(values):.0f}", f"{max(values):.0f}", style=style)
    console.print(table)


def run_kind(kind: str, args: argparse.Namespace, output: Path, console: Console) -> list[Row]:
    """All measurements of one kind. Raises JobFailed."""
    rng = random.Random(args.seed)
    rows: list[Row] = []
    most = 1 if kind == "unreachable" else args.kills
    for number, victims in enumerate(orders(args.count, most, rng)):
        found = run_job(kind, args, output.with_suffix("") / f"{kind}-{number}", victims, rng)
        rows += found
        console.print(f"{kind}, job {number + 1}: " + ", ".join(f"{row['total']:.0f} ms" for row in found))
    show(kind, rows, console)
    return rows


def run_beside(other: Path, args: argparse.Namespace, output: Path) -> int:
    """The same victims in this checkout and in ``other``, a job here and a job there, the first of them in turns: what
    else the machine does meanwhile slows down both. Prints the totals of both, and writes every number."""
    here = Path(__file__).resolve().parents[2]
    found: dict[str, dict[str, list[Row]]] = {str(each): {kind: [] for kind in args.kind} for each in (other, here)}
    loads = [os.getloadavg()[0]]
    for number in range(-(-args.count // args.kills)):
        told: dict[str, Any] = {}
        for place in (other, here) if number % 2 else (here, other):
            part = output.with_name(f"{output.stem}-beside.json")
            command = [sys.executable, str(place / "scripts" / "bench" / "recovery.py"), "--kind", *args.kind,
                       "--count", str(min(args.kills, args.count - number * args.kills)), "--kills", str(args.kills),
                       "--reduction", args.reduction, "--step", args.step, "--seed", str(args.seed + number),
                       "--heartbeat-timeout", str(args.heartbeat_timeout), "--limit", str(args.limit),
                       "--output", str(part)]
            done = subprocess.run(command, cwd=place, env={**os.environ, "PYTHONPATH": str(place)}, check=False,
                                  stdout=subprocess.DEVNULL)
            if done.returncode:
                print(f"recovery.py: job {number} in {place} has failed, and counts nowhere", file=sys.stderr)
                continue
            told[str(place)] = json.loads(part.read_text())["kinds"]
            loads.append(os.getloadavg()[0])
        for place_name, kinds in told.items() if len(told) == len(found) else ():
            for kind, measured_there in kinds.items():
                found[place_name][kind] += measured_there["each"]
    if not all(rows for kinds in found.values() for rows in kinds.values()):
        print("recovery.py: no job has ended well in both", file=sys.stderr)
        return 1
    for kind in args.kind:
        for place in (other, here):
            totals = [row["total"] for row in found[str(place)][kind]]
            print(f"{kind}, {place.name}: {len(totals)}, median {statistics.median(totals):.0f} ms, worst "
                  f"{max(totals):.0f} ms; load {min(loads):.0f} to {max(loads):.0f} on {os.cpu_count()} cores")
    output.write_text(json.dumps({"found": found, "loads": loads}, indent=2) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", nargs="+", default=["exit"], choices=(*KINDS, "all"))
    parser.add_argument("--count", type=int, default=20, metavar="N", help="of each kind (default 20)")
    parser.add_argument("--kills", type=int, default=4, choices=range(1, 5), help="most of them in one job")
    parser.add_argument("--reduction", default="exact", choices=("exact", "fast"))
    parser.add_argument("--step", default="staggered", choices=("staggered", "barrier"))
    parser.add_argument("--heartbeat-timeout", type=float, default=4.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=180.0, metavar="SECONDS", help="for each job")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/recovery.json"))
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another checkout to compare this one with")
    args = parser.parse_args()
    exit_on_sigterm()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    output = args.output.absolute()
    if args.beside is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        return run_beside(args.beside.resolve(), args, output)
    record: dict[str, Any] = {
        "grid": {"pipelines": PIPELINES, "stages": STAGES, "microbatches": MICROBATCHES},
        "reduction": args.reduction, "step": args.step, "seed": args.seed, "heartbeat_timeout": args.heartbeat_timeout,
        "processors": os.cpu_count(), "load_before": os.getloadavg()[0], "kinds": {},
    }
    for kind in KINDS if "all" in args.kind else args.kind:
        try:
            rows = run_kind(kind, args, output, console)
        except JobFailed as error:
            print(f"recovery.py: {kind}: {error}", file=sys.stderr)
            return 1
        totals = [row["total"] for row in rows]
        found = {"median_ms": statistics.median(totals), "worst_ms": max(totals), "each": rows}
        record["kinds"][kind] = found
        print(f"{kind}: median {found['median_ms']:.0f} ms, worst {found['worst_ms']:.0f} ms", flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"every number is in {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
