#!/usr/bin/env python3
"""What one change of the membership costs a large job's coordinator: bytes, and processor time.

    python scripts/bench/membership.py                             # 1,000 workers, 5 losses
    python scripts/bench/membership.py --grid 256x16x64 --losses 1 # 4,096 workers
    python scripts/bench/membership.py --grid 1042x12x16           # 12,504 workers: an H200's host has 8 of them

The coordinator is the real one, in a process of its own, and so are the plans, which are made before (planner.py times
that). Workers and launchers are connections of one other process (light_workers.py), 8 workers and one launcher to a
host; they give no other signs of life. Workers are lost one after the other. Printed, and written to
runs/bench/membership.json: the bytes that all others are sent for a loss, beside those of the go told to each of them
as it is; the coordinator's processor time; and the time until the last worker has all of its go.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from light_workers import PER_HOST, Clients, Launcher, led, processor_seconds, wait_for  # beside this script

from megatron_recycle.control import Timeouts
from megatron_recycle.control.planning import Planning
from megatron_recycle.membership.description import Job

PATIENT = Timeouts(heartbeat_interval=1000.0, heartbeat_timeout=10_000.0, report_timeout=10_000.0, hello_timeout=1000.0,
                   start_timeout=10_000.0)


def victims(stages: int, losses: int) -> list[int]:
    """Workers of different pipelines and stages."""
    return [number * stages + number % stages for number in range(losses)]


def real_plans(grid: Mapping[str, Any], losses: int) -> Any:
    """The plans of all memberships that will come, made before."""
    planning, stages = Planning(lambda plan: None), grid["stages"]
    lost = [f"{number // stages}:{number % stages}" for number in victims(stages, losses)]
    plans = {failed: planning.plan(Job.from_json({"grid": dict(grid)}), failed)
             for failed in (frozenset(lost[:number]) for number in range(losses + 1))}
    return lambda description, failed: plans[failed]


async def measure(grid: Mapping[str, Any], losses: int, address: str, pid: int, pipe: Pipe) -> dict[str, Any]:
    job = Clients(address, grid)
    size = len(job.clients)
    launchers = [await Launcher.come(job.address, f"host{number}") for number in range(-(-size // PER_HOST))]
    await job.connect()
    await job.until_told("go", 1)
    await asyncio.to_thread(wait_for, pipe, "started", 1)
    found: list[dict[str, float]] = []
    for number, victim in enumerate(victims(grid["stages"], losses)):
        generation = number + 2
        used, came = processor_seconds(pid), job.bytes
        told = sum(launcher.bytes for launcher in launchers)
        lost = launchers[0].lose(job.clients[victim])
        went = await job.until_told("go", generation)
        await asyncio.to_thread(wait_for, pipe, "resumed", generation)
        await asyncio.sleep(0.5)  # what launchers are told last
        found.append({"workers_mb": (job.bytes - came) / 1e6,
                      "launchers_mb": (sum(launcher.bytes for launcher in launchers) - told) / 1e6,
                      "cpu_s": processor_seconds(pid) - used, "went_s": went - lost})
    failed = frozenset(f"{job.clients[number].name}" for number in victims(grid["stages"], losses))
    members = {client.name: f"i{client.number}" for client in job.clients}
    plan = Planning(lambda plan: None).plan(Job.from_json({"grid": dict(grid)}), failed).to_json()
    go_mb = len(json.dumps({"plan": plan, "members": members}, separators=(",", ":"))) / 1e6
    return {"workers": size, "hosts": len(launchers), "load": os.getloadavg()[0], "connected_again": job.again,
            "go_mb": go_mb, "each_mb": go_mb * size, "losses": found}


def table(found: Mapping[str, Any]) -> str:
    def of(name: str) -> float:
        return statistics.median(loss[name] for loss in found["losses"])

    sent = of("workers_mb") + of("launchers_mb")
    return (f"{found['workers']} workers on {found['hosts']} hosts, a go of {found['go_mb']:.2f} MB; medians of "
            f"{len(found['losses'])} losses at a load of {found['load']:.0f}:\n"
            f"sent: {of('workers_mb'):.2f} MB to workers and {of('launchers_mb'):.2f} MB to launchers, a "
            f"{found['each_mb'] / sent:.0f}th of the go told to each worker ({found['each_mb']:.0f} MB)\n"
            f"the coordinator's processor time: {of('cpu_s'):.2f} s; the last worker has its go after "
            f"{of('went_s'):.2f} s")


def grid_of(text: str) -> dict[str, Any]:
    pipelines, stages, microbatches = map(int, text.split("x"))
    return {"stages": stages, "microbatches": [microbatches] * pipelines}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=grid_of, default="125x8x32", help="PIPELINESxSTAGESxMICROBATCHES")
    parser.add_argument("--losses", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/membership.json"))
    args = parser.parse_args(arguments)
    size = args.grid["stages"] * len(args.grid["microbatches"])
    with led(size, partial(real_plans, args.grid, args.losses), PATIENT) as (address, pid, pipe):
        found = asyncio.run(measure(args.grid, args.losses, address, pid, pipe))
    print(table(found))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
