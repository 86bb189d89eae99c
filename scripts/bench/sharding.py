#!/usr/bin/env python3
"""The cost of shards that are held more than once: bytes per parameter of a worker, bytes sent, and time, against
stock's ZeRO-1.

    python scripts/bench/sharding.py                # 8 pipelines of one stage, bf16, gradients summed in fp32, Adam

Each side is a job of its own in a network namespace of its own (which needs root, or user namespaces), so that what the
kernel counts there is what the job sends, of all kinds: gradients and parameters make up nearly all of it. A worker
counts the bytes of all its tensors: while it trains (at the end of the last layer's backward), while gradients or
parameters travel, in the optimizer's step and after it; those of buffers that a library keeps for itself are not in it.
Sides take turns, `--rounds` times, and of each the quickest round counts. On a machine that does other things wall time
says little, and processor time more. Writes runs/bench/sharding.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SCRIPT = Path(__file__).resolve().parent / "sharded_job.py"
ALONE = ("unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
SIDES = {"stock": None, **{f"{copies}, {step}": {"RECYCLE_STATE_COPIES": copies, "RECYCLE_STEP": step}
                           for step in ("barrier", "staggered") for copies in ("1", "2", "all")}}
"""The settings of each side; None: without the plugin."""


def run(side: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One side's numbers: the most of all workers, and what they have sent on average."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    given = [str(SCRIPT), "--width", str(args.width), "--layers", str(args.layers), "--stages", str(args.stages),
             "--microbatches", str(args.microbatches), "--batch", str(args.batch), "--iterations",
             str(args.iterations), "--zero", "1", "--to", str(folder)]
    settings, size = SIDES[side], args.pipelines * args.stages
    bin_ = Path(sys.executable).parent
    start = [str(bin_ / "torchrun"), "--nproc-per-node", str(size)] if settings is None else [
        str(bin_ / "recycle"), "run", "--nproc", str(size)]
    with (folder / "log").open("w") as log:
        subprocess.run([*ALONE, *start, *given], check=True, stdout=log, stderr=log, timeout=args.limit, env={
            **os.environ, **(settings or {}), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
    found = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return {"bytes": {moment: max(each["bytes"][moment] for each in found) for moment in found[0]["bytes"]},
            "sent": max(each["sent"] for each in found) / sum(each["parameters"] for each in found),
            "seconds": max(each["seconds"] for each in found), "parameters": found[0]["parameters"],
            "processor": sum(each["processor"] for each in found) / len(found)}


def best(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One side's numbers of several rounds: what other programs took of the machine is in none of the least."""
    return {**rounds[-1], **{name: min(each[name] for each in rounds) for name in ("seconds", "processor")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, default=8)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a job may take")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in args.sides}
    for _ in range(args.rounds):
        for side, those in runs.items():
            those.append(run(side, args.out.absolute() / "sharding" / side.replace(", ", "-"), args))
    found = {side: best(those) for side, those in runs.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "sharding.json").write_text(json.dumps({"pipelines": args.pipelines, "stages": args.stages, **found},
                                                       indent=1))
    table = Table("copies, step", "training", "reducing", "in the step", "after it", "sent",
                  "ms/iteration", "ms of processors", title="bytes per parameter of a worker")
    stock = found.get("stock")
    for side, numbers in found.items():
        times = [f"{1000 * numbers[name]:.0f}" + (f" ({numbers[name] / stock[name]:.2f})" if stock else "")
                 for name in ("seconds", "processor")]
        table.add_row(side, *(f"{numbers['bytes'][moment]:.2f}" for moment in ("training", "reduce", "step", "after")),
                      f"{numbers['sent']:.2f}", *times)
    Console().print(table)


if __name__ == "__main__":
    main()
