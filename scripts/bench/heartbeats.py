#!/usr/bin/env python3
"""The cost of a large job's heartbeats to its coordinator, and the time until it acts on a loss while they come in.

    python scripts/bench/heartbeats.py                   # 2,000 workers, 10 losses
    python scripts/bench/heartbeats.py --workers 500

The coordinator is the real one, in a process of its own, with its journal on disk. Its workers are connections of one
other process that speak the real protocol over loopback (light_workers.py): a heartbeat each `--interval` seconds with
what a training thread does, and a commit each `--iteration` seconds. Then workers are lost, one after the other.
Printed, and written to runs/bench/heartbeats.json: share of one core that the coordinator takes in steady training, and
time from a loss until it is decided, until the stop has reached the last worker, and until the last one is told to go
on. Plans are empty here: scripts/bench/planner.py times the making of one, membership.py what it costs to tell it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from light_workers import Clients, Launcher, led, processor_seconds, wait_for  # beside this script

from megatron_recycle.control import Timeouts
from megatron_recycle.plan.plan_file import PlanFile

STAGES = 8


def no_plans() -> Any:
    def plan(job: Any, failed: frozenset[str]) -> PlanFile:
        return PlanFile(source="none", digest=str(len(failed)))

    return plan


class Training(Clients):
    """Workers that give signs of life, their clocks spread evenly over an interval, and commit."""

    def __init__(self, args: argparse.Namespace, address: str) -> None:
        grid = {"stages": STAGES, "microbatches": [8] * (args.workers // STAGES)}
        super().__init__(address, grid, heartbeat_interval=args.interval, heartbeat_timeout=20 * args.interval)
        self.args = args
        self.training = True

    async def beat_on(self) -> None:
        """Every worker once each interval, in twenty groups."""
        groups = 20
        due = time.monotonic()
        number = 0
        while True:
            for client in self.clients[number % groups::groups]:
                if not client.dead:
                    client.beat()
            number += 1
            due += self.args.interval / groups
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def commit_on(self, generation: int) -> None:
        """Every worker each iteration, one stage after the other."""
        iteration = 0
        while self.training:
            for stage in range(STAGES):
                for client in self.clients[stage::STAGES]:
                    client.commit(iteration, generation)
                await asyncio.sleep(self.args.iteration / STAGES)
            iteration += 1


async def measure(args: argparse.Namespace, address: str, pid: int, pipe: Pipe) -> dict[str, Any]:
    job = Training(args, address)
    began = time.monotonic()
    await job.connect()
    beating = asyncio.create_task(job.beat_on())
    await job.until_told("go", 1)
    forming = time.monotonic() - began
    committing = asyncio.create_task(job.commit_on(1))
    await asyncio.sleep(2 * args.interval)
    used, at = processor_seconds(pid), time.monotonic()
    own = processor_seconds(os.getpid())
    await asyncio.sleep(args.seconds)
    elapsed = time.monotonic() - at
    share = (processor_seconds(pid) - used) / elapsed
    own_share = (processor_seconds(os.getpid()) - own) / elapsed
    job.training = False
    await committing  # all have committed the same
    launcher = await Launcher.come(job.address, "host0")
    losses: list[dict[str, float]] = []
    for number in range(args.losses):
        victim = job.clients[number * STAGES * 3 + number % STAGES]
        generation = number + 2
        used = processor_seconds(pid)
        lost = launcher.lose(victim)
        went = await job.until_told("go", generation)
        stopped = max(job.heard["stop", generation].values())
        decided = await asyncio.to_thread(wait_for, pipe, "decided", generation)
        losses.append({"decided_ms": 1000 * (decided - lost), "stopped_ms": 1000 * (stopped - lost),
                       "went_ms": 1000 * (went - lost)})
        await asyncio.to_thread(wait_for, pipe, "resumed", generation)
        losses[-1]["cpu_ms"] = 1000 * (processor_seconds(pid) - used)
        await asyncio.sleep(args.interval)
    beating.cancel()
    return {"workers": args.workers, "load": os.getloadavg()[0], "connected_again": job.again,
            "interval_s": args.interval, "iteration_s": args.iteration,
            "heartbeats_per_s": args.workers / args.interval, "commits_per_s": args.workers / args.iteration,
            "forming_s": forming, "coordinator_cpu_share": share, "clients_cpu_share": own_share, "losses": losses}


def table(found: dict[str, Any]) -> str:
    share, own = (100 * found[f"{who}_cpu_share"] for who in ("coordinator", "clients"))
    lines = [f"{found['workers']} workers, a heartbeat each {found['interval_s']:g} s, an iteration each "
             f"{found['iteration_s']:g} s: the coordinator takes {share:.1f} % of a core (the simulated workers "
             f"{own:.1f} %); all were in after {found['forming_s']:.1f} s"]
    for key, text in (("cpu_ms", "the coordinator's processor time for a loss"),
                      ("decided_ms", "loss until decided"),
                      ("stopped_ms", "until the last worker is told to stop"),
                      ("went_ms", "until the last worker is told to go on")):
        values = [loss[key] for loss in found["losses"]]
        lines.append(f"{text}: median {statistics.median(values):.0f} ms, worst {max(values):.0f} ms")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2000, help=f"a multiple of {STAGES}")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between two heartbeats of a worker")
    parser.add_argument("--iteration", type=float, default=1.0, help="seconds that an iteration takes")
    parser.add_argument("--seconds", type=float, default=10.0, help="of steady training to measure")
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/heartbeats.json"))
    args = parser.parse_args()
    if args.workers % STAGES:
        parser.error(f"--workers must be a multiple of {STAGES}")
    timeouts = Timeouts(heartbeat_interval=args.interval, heartbeat_timeout=20 * args.interval)
    with led(args.workers, no_plans, timeouts) as (address, pid, pipe):
        found = asyncio.run(measure(args, address, pid, pipe))
    print(table(found))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
