#!/usr/bin/env python3
"""How much accuracy lost buys how much time: the same job, text and failures under each policy.

    python scripts/bench/policies.py                        # all policies; 1, 2 and 4 failures
    python scripts/bench/policies.py --policy reroute rollback --failures 2

The quickstart's model (no dropout) in 3 pipelines of 2 stages, `reduction: fast`; `exact` is policy reroute with
`reduction: exact`. Workers get SIGKILL at iterations and moments that a seed has drawn, the same for all policies, and
are started again (`max_restarts`), as a replacement would be; they need some seconds until they are in. `restart` is
checkpoint and restart: every failure ends all, and `recycle run --job-restarts` starts the script again from its last
checkpoint, whose period is Young and Daly's for that failure rate and the measured cost of a checkpoint.

Measured: the time from the first commit to the last, beyond as many iterations of the same run's median time (other
runs may have met a busier machine); iterations that were committed twice; actions done again, in iterations of all
workers; samples that no step has seen; the validation loss of the final parameters; whether these are those of the run
without failures, bit for bit. Writes runs/bench/policies.json after each run, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs import Job, exit_on_sigterm

from gpt_deepspeed import validate
from megatron_recycle.checkpoint_period import young_daly

PIPELINES, STAGES, MICROBATCHES, BATCH = 3, 2, 4, 8
POLICIES = ("exact", "reroute", "drop", "rollback", "lossy_forward", "restart")
_SAVE_EVERY = 10
Row = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """A worker dies when this iteration has been committed and a share of the next one's time has passed."""

    after: int
    share: float
    worker: str


def drawn(count: int, iterations: int, seed: int) -> list[Failure]:
    """Failures spread over the job, one in each of ``count`` equal parts."""
    draw = random.Random(1000 * seed + count)
    first, last = 4, iterations - 6
    part = (last - first) / count
    return [Failure(int(first + part * (number + draw.random())), draw.random(),
                    f"{draw.randrange(PIPELINES)}:{draw.randrange(STAGES)}") for number in range(count)]


@dataclass
class JobHistory:
    """What the events of a run tell."""

    commits: list[tuple[float, int]] = field(default_factory=list)
    redone: int = 0
    left_out: dict[int, int] = field(default_factory=dict)
    """From this iteration on so many micro-batches are not run."""
    alive: set[str] = field(default_factory=set)

    def add(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "committed":
            self.commits.append((event["t"], event["iteration"]))
        elif event["event"] == "reconciled":
            self.redone += event["redone"]
        elif event["event"] == "left_out":
            self.left_out[event["iteration"]] = event["microbatches"]
        elif event["event"] in ("started", "decided"):
            self.alive = set(event["members"])

    def lost_samples(self) -> int:
        """Windows of the iterations that were committed last under each number, which no step has seen."""
        changes = sorted(self.left_out.items())
        return BATCH * sum(next((count for begin, count in reversed(changes) if begin <= iteration), 0)
                           for iteration in {iteration for _, iteration in self.commits})

    def pace(self) -> float:
        """Seconds from one commit to the next, the median."""
        return statistics.median(later[0] - earlier[0] for earlier, later in pairwise(self.commits)) if (
            len(self.commits) > 1) else 0.1


def run(policy: str, failures: Sequence[Failure], save_every: int, args: argparse.Namespace) -> Row:
    """One job. ``save_every`` 0: without checkpoints. Raises JobFailed."""
    folder = args.output.parent / "policies" / f"{policy}-{len(failures)}"
    shutil.rmtree(folder, ignore_errors=True)
    words: list[Any] = ["--iterations", args.iterations, "--stages", STAGES, "--microbatches", MICROBATCHES, "--batch",
                        BATCH, "--dropout", 0, "--lr", 1e-3, "--dump", folder / "dump"]
    if save_every:
        words += ["--checkpoints", folder / "checkpoints", "--save-every", save_every]
    settings = {"reduction": "exact" if policy == "exact" else "fast", "heartbeat_timeout": "20",
                "policy": "reroute" if policy == "exact" else policy}
    if policy != "restart":
        settings["max_restarts"] = str(len(failures))
    seen, due = JobHistory(), list(failures)
    with Job("gpt_deepspeed.py", [str(word) for word in words], folder, PIPELINES * STAGES, settings, args.limit,
             restarts=max(1, len(failures)) if policy == "restart" else 0) as job:
        for event in job.events():
            seen.add(event)
            if event["event"] == "committed" and due and event["iteration"] >= due[0].after:
                failure = due.pop(0)
                # One that is away already cannot die: its peer does, unless the stage has no other.
                stage = failure.worker[-1]
                there = sorted(name for name in seen.alive if name[-1] == stage)
                victim = failure.worker if failure.worker in there else there[-1]
                if len(there) > 1 or policy == "restart":
                    time.sleep(failure.share * seen.pace())
                    job.kill(victim)
        job.check_ended_well()
    dumps = [torch.load(next((folder / "dump").glob(f"worker-*-{stage}.pt")), weights_only=True)
             for stage in range(STAGES)]
    each = PIPELINES * STAGES * MICROBATCHES * 3  # actions of an iteration: F, B, W
    return {"policy": policy, "failures": len(failures), "save_every": save_every, "iterations": args.iterations,
            "seconds": round(seen.commits[-1][0] - seen.commits[0][0], 2), "pace": round(seen.pace(), 3),
            "again": len(seen.commits) - len({iteration for _, iteration in seen.commits}),
            "redone": round(seen.redone / each, 2), "lost_samples": seen.lost_samples(),
            "loss": round(validate(folder / "dump")["final_validation_loss"], 4), "commits": seen.commits,
            "parameters": {f"{stage} {name}": value for stage, dump in enumerate(dumps)
                           for name, value in dump["parameters"].items()}}


def cost_of_saving(row: Row) -> float:
    """Seconds that a checkpoint takes beyond an iteration, the median."""
    gaps = {later[1]: later[0] - earlier[0] for earlier, later in pairwise(row["commits"])}
    saves = [gap for iteration, gap in gaps.items() if iteration % _SAVE_EVERY == 0]
    return max(0.01, statistics.median(saves) - row["pace"])


def compared(row: Row, whole: Row) -> Row:
    """``row`` beside the run without failures."""
    parameters = row.pop("parameters")
    same = all(torch.equal(value, whole["parameters"][name]) for name, value in parameters.items())
    return {**{key: value for key, value in row.items() if key != "commits"}, "equal": same,
            "lost_seconds": round(row["seconds"] - (row["iterations"] - 1) * row["pace"], 1),
            "loss_difference": round(row["loss"] - whole["loss"], 4)}


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table("failures", "policy", "time lost", "iterations again", "parts of them", "samples lost",
                  "validation loss", "against none", "bits equal")
    for row in sorted(rows, key=lambda row: (row["failures"], POLICIES.index(row["policy"]))):
        table.add_row(str(row["failures"]), row["policy"], f"{row['lost_seconds']:.1f} s", str(row["again"]),
                      f"{row['redone']:.2f}", str(row["lost_samples"]), f"{row['loss']:.4f}",
                      f"{row['loss_difference']:+.4f}", "yes" if row["equal"] else "no")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--failures", nargs="+", type=int, default=[1, 2, 4], metavar="N", help="in a job")
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for each run")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/policies.json"))
    args = parser.parse_args()
    exit_on_sigterm()
    console = Console()
    whole = {reduction: run(policy, [], 0, args) for reduction, policy in (("fast", "reroute"), ("exact", "exact"))}
    save = 0.0
    if "restart" in args.policy:
        save = cost_of_saving(run("restart", [], _SAVE_EVERY, args))
    rows: list[Row] = []
    for count in args.failures:
        failures = drawn(count, args.iterations, args.seed)
        for policy in args.policy:
            base = whole["exact" if policy == "exact" else "fast"]
            every = 0
            if policy == "restart":
                mtbf = base["seconds"] / count
                every = max(1, round(young_daly(save, mtbf) / base["pace"]))
            row = compared(run(policy, failures, every, args), base)
            rows.append(row)
            console.print({key: row[key] for key in ("failures", "policy", "lost_seconds", "loss", "lost_samples")})
            args.output.parent.mkdir(parents=True, exist_ok=True)
            about = {name: {key: whole[name][key] for key in ("seconds", "pace", "loss")} for name in whole}
            args.output.write_text(json.dumps({"undisturbed": about, "save_seconds": round(save, 3), "rows": rows},
                                              indent=1))
    show(rows, console)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
