#!/usr/bin/env python3
"""Our model of torchft beside torchft itself, through the same scripted kills.

    python scripts/bench/validate_torchft.py                 # 3 pipelines, 3 minutes, 3 kills

torchft 0.2.0 runs in an environment of its own (`others.py` makes it). A pipeline is a replica group, and here one
process, whose iteration sleeps as long as 1F1B takes; a kill is SIGKILL, and a replacement is started a while later.
The lighthouse gives a group up after 1 s, as where the stall of `simulate.policies.others.TorchFT` was measured, and
waits for groups that are late as long as it does by default: with less than an iteration, groups that are once apart go
on by turns, each by itself. The
simulator gets the same kills, and for each the moment at which the replacement had its manager. The iteration before
the first kill takes what it takes, as a profile would have it. Compared are the samples of the committed iterations:
within 5 %, or status 1. Writes runs/bench/validate_torchft.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs import JobFailed, exit_on_sigterm
from others import environment, free_port

from megatron_recycle.launch.child import Child
from megatron_recycle.plan import Costs
from megatron_recycle.tools.simulate.cluster import Cluster
from megatron_recycle.tools.simulate.cluster import changes as changes_of
from megatron_recycle.tools.simulate.job import Job
from megatron_recycle.tools.simulate.plans import Plans
from megatron_recycle.tools.simulate.policies.base import Setting
from megatron_recycle.tools.simulate.policies.others import TorchFT
from megatron_recycle.tools.simulate.policies.recycling import Stalls
from megatron_recycle.tools.simulate.run import simulate
from megatron_recycle.tools.simulate.trace import Cleaning, Outage, checked

PIPELINES = 3
LIMIT = 0.05
SCRIPT = Path(__file__).resolve().parent / "rivals" / "sleep_torchft.py"
KILLS = ((0.15, 1), (0.45, 0), (0.75, 2))
"""Share of the time, and the group."""
BACK = 15.0
"""Seconds after which a replacement is started."""

Line = dict[str, Any]


def measure(python: Path, seconds: float, iteration: float, folder: Path) -> tuple[list[Line], list[Line]]:
    """The lines of the groups, and the kills, of ``seconds`` from the first commit on. Raises JobFailed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    port = free_port()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
               "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    lighthouse = [str(python.parent / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}", "--min_replicas", "1",
                  "--quorum_tick_ms", "100", "--join_timeout_ms", "60000", "--heartbeat_timeout_ms", "1000"]
    children = [Child(lighthouse, environ, folder / "lighthouse.log")]

    def start(group: int) -> Child:
        command = [str(python), str(SCRIPT), "--seconds", str(iteration), "--folder", str(folder)]
        children.append(Child(command, {**environ, "REPLICA_GROUP_ID": str(group)}, folder / f"group-{group}.log"))
        return children[-1]

    def lines() -> list[Line]:
        path = folder / "lines.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    kills: list[Line] = []
    try:
        groups = [start(group) for group in range(PIPELINES)]
        limit = time.monotonic() + 120
        while not (full := [line for line in lines() if line.get("groups") == PIPELINES]):
            if time.monotonic() > limit:
                raise JobFailed(f"the groups have not come together in 120 s; see {folder}")
            time.sleep(0.05)
        began = full[0]["t"]
        todo = sorted([(share * seconds, "kill", group) for share, group in KILLS]
                      + [(share * seconds + BACK, "start", group) for share, group in KILLS])
        for at, what, group in todo:
            time.sleep(max(0.0, began + at - time.time()))
            if what == "kill":
                kills.append({"t": time.time(), "worker": group})
                groups[group].signal(signal.SIGKILL)
            else:
                groups[group] = start(group)
        time.sleep(max(0.0, began + seconds - time.time()))
        return [line for line in lines() if line["t"] >= began], kills
    finally:
        for child in children:
            if child.status() is None:
                child.signal(signal.SIGKILL)
            child.wait(10)
            child.release()


def compare(lines: list[Line], kills: list[Line]) -> dict[str, Any]:
    """Samples from the first commit to the last, measured and simulated; a group has one sample an iteration."""
    commits: dict[int, tuple[float, int]] = {}
    for line in lines:
        if "iteration" in line:
            t, groups = commits.get(line["iteration"], (line["t"], 0))
            commits[line["iteration"]] = min(t, line["t"]), max(groups, line["groups"])
    times = sorted(commits.values())
    began, ended = times[0][0], times[-1][0]
    pace = median(b[0] - a[0] for a, b in pairwise(t for t in times if t[0] < kills[0]["t"]))
    job = Job(PIPELINES, 1, 1, Costs.uniform(1, round(pace * 1e6), 0, 0))
    cluster, plans, duration = Cluster(PIPELINES, 1), Plans(job), ended - began
    slots = {worker.pipeline: place.host for worker, place in cluster.slots(PIPELINES, 1).items()}
    outages = []
    for kill in kills:
        back = next((line["t"] for line in lines if line.get("ready") and line["worker"] == kill["worker"]
                     and line["t"] > kill["t"]), ended + 1)
        outages.append(Outage(kill["t"] - began, back - began, f"host{slots[kill['worker']]}"))
    trace = checked([f"host{number}" for number in range(PIPELINES)], outages, duration, Cleaning())
    happened, _ = changes_of(trace, cluster)
    policy = TorchFT(Stalls(start=0.0, save=0.0, save_every=1e9))
    outcome = simulate(policy, Setting(job, cluster, plans, cluster.units(), duration), happened, duration)
    measured = sum(groups for _, groups in times[1:])
    return {"seconds": duration, "iteration_s": pace, "samples_measured": measured,
            "samples_simulated": outcome.samples, "off": outcome.samples / measured - 1,
            "iterations_measured": len(times) - 1, "iterations_simulated": outcome.iterations,
            "spent": dict(outcome.spent),
            "longest_s": sorted((round(b[0] - a[0], 2) for a, b in pairwise(times)), reverse=True)[:8]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--iteration", type=float, default=1.35, metavar="SECONDS",
                        help="what 1F1B takes; 4 stages, 6 micro-batches, units of 2.5 ms")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/validate_torchft.json"))
    args = parser.parse_args()
    exit_on_sigterm()
    folder = args.output.absolute().with_suffix("")
    try:
        python = environment("torchft", folder.parent / "others" / "env-torchft")
        lines, kills = measure(python, 60 * args.minutes, args.iteration, folder)
    except JobFailed as error:
        print(f"validate_torchft.py: {error}", file=sys.stderr)
        return 1
    found = {**compare(lines, kills), "load": os.getloadavg()[0]}
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['samples_measured']} samples in {found['seconds']:.0f} s, {found['samples_simulated']} simulated: "
          f"{100 * found['off']:+.1f} %; the longest iterations took {found['longest_s']} s; load {found['load']:.0f}")
    return 0 if abs(found["off"]) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
