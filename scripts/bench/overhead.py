#!/usr/bin/env python3
"""What the plugin costs while nothing fails: iterations of the quickstart's job against the stock engine.

    python scripts/bench/overhead.py                      # 3 rounds of stock, fast, exact
    python scripts/bench/overhead.py --backend megatron   # stock is megatron-core's own 1F1B

Each round runs the backend's script once per side, in turn and in another order each time: the stock framework
under torchrun, the plugin with `reduction: fast` and `reduction: exact` under `recycle run`. All read their data
in the training process (DeepSpeed would start two loader processes per worker otherwise), with one thread each.

Per side: the median time of an iteration, and the processor time that all workers together spend on one (without
the coordinator and the launchers), each beside stock's of the same round; the ratio is the median over rounds.
Processor time depends less on what else the machine does than iteration time. For the plugin's sides also the memory
that a worker keeps besides parameters and optimizer: sums of gradients (`exact` keeps several apart), the reduced
gradient, and the copy to undo a step. Prints a table and writes runs/bench/overhead.json with every iteration's
numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs import SCRIPTS, Job, JobFailed, exit_on_sigterm

from megatron_recycle.launch.child import Child

PIPELINES, STAGES, MICROBATCHES = 3, 2, 4
WORKERS = PIPELINES * STAGES
SIDES = ("stock", "fast", "exact")
TRAINING = {"deepspeed": "gpt_deepspeed.py", "megatron": "pretrain_gpt_megatron.py"}
"""Backend -> the training script that runs on it."""
SKIPPED = 5
"""First iterations of a run that do not count."""


Kept = dict[str, int]
"""Most bytes that a worker keeps, by what for."""


def run(side: str, args: argparse.Namespace, folder: Path) -> tuple[list[list[tuple[float, float]]], Kept]:
    """One run; for each worker and iteration (seconds, processor seconds), and what the plugin keeps."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("worker-*.pt"):
        old.unlink()
    arguments = ["--iterations", str(args.iterations + SKIPPED), "--stages", str(STAGES), "--dump", str(folder)]
    arguments += ["--microbatches", str(MICROBATCHES), "--width", str(args.width), "--batch", str(args.batch)]
    script = TRAINING[args.backend]
    kept: Kept = {}
    if side == "stock":
        extra = ["--in-process-data"] if args.backend == "deepspeed" else []
        run_stock([str(SCRIPTS / script), *arguments, *extra], folder, args.limit)
    else:
        settings = {"reduction": side, "step": args.step}
        with Job(script, arguments, folder, WORKERS, settings, args.limit) as job:
            for event in job.events():
                for own in event.get("kept", {}).values():
                    kept = {name: max(size, kept.get(name, 0)) for name, size in own.items()}
            job.check_ended_well()
    dumps = sorted(folder.glob("worker-*.pt"))
    if len(dumps) != WORKERS:
        raise JobFailed(f"{len(dumps)} of {WORKERS} workers left their times in {folder}")
    return [torch.load(path, weights_only=True)["times"][SKIPPED:] for path in dumps], kept


def run_stock(arguments: Sequence[str], folder: Path, limit: float) -> None:
    """The script under torchrun, without the plugin."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
    environ = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **os.environ}
    log = folder / "torchrun.log"
    child = Child([*command, *arguments], environ, log)
    try:
        status = child.wait(limit)
        if status != 0:
            raise JobFailed(f"stock {'takes too long' if status is None else f'ended with {status}'}: see {log}")
    finally:
        if child.status() is None:
            child.signal(signal.SIGTERM)  # torchrun ends its workers
            if child.wait(15.0) is None:
                child.signal(signal.SIGKILL)
                child.wait(5.0)
        child.release()


def of_run(workers: Sequence[Sequence[tuple[float, float]]]) -> dict[str, list[float]]:
    """Per iteration: its time (the first worker's), and the processor time of all workers."""
    return {
        "seconds": [wall for wall, _ in workers[0]],
        "processor_seconds": [sum(worker[k][1] for worker in workers) for k in range(len(workers[0]))],
    }


def each_round(runs: Mapping[str, Sequence[Mapping[str, list[float]]]], side: str, key: str) -> list[float]:
    """A side's median divided by stock's, round by round: a shared machine may be half as fast minutes later."""
    return [statistics.median(own[key]) / statistics.median(stock[key])
            for own, stock in zip(runs[side], runs["stock"])]


def ratios(runs: Mapping[str, Sequence[Mapping[str, list[float]]]], key: str) -> dict[str, float]:
    """The median over rounds, for each side."""
    return {side: statistics.median(each_round(runs, side, key)) for side in runs}


def show(runs: Mapping[str, Sequence[Mapping[str, list[float]]]], console: Console) -> None:
    table = Table("", "iteration", "ratio", "each round", "processor time", "ratio", "each round")
    for side, own in runs.items():
        cells = [side]
        for key in ("seconds", "processor_seconds"):
            median = statistics.median(value for run in own for value in run[key])
            cells += [f"{median * 1000:.0f} ms", f"{ratios(runs, key)[side]:.3f}",
                      " ".join(f"{ratio:.2f}" for ratio in each_round(runs, side, key))]
        table.add_row(*cells)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=40, help="that count, in each run")
    parser.add_argument("--width", type=int, default=96, help="of the model")
    parser.add_argument("--batch", type=int, default=4, help="windows per micro-batch")
    parser.add_argument("--backend", choices=tuple(TRAINING), default="deepspeed")
    parser.add_argument("--step", choices=("staggered", "barrier"), help="default: staggered; Megatron: barrier")
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS", help="for each run")
    parser.add_argument("--output", type=Path, help="default: runs/bench/overhead.json, or overhead-megatron.json")
    args = parser.parse_args()
    if args.step is None:
        args.step = "barrier" if args.backend == "megatron" else "staggered"
    if args.output is None:
        args.output = Path("runs/bench") / (
            "overhead.json" if args.backend == "deepspeed" else f"overhead-{args.backend}.json")
    exit_on_sigterm()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    output = args.output.absolute()
    runs: dict[str, list[dict[str, list[float]]]] = {side: [] for side in SIDES}
    load = []
    kept: dict[str, Kept] = {}
    for number in range(args.rounds):
        for side in SIDES[number % len(SIDES):] + SIDES[:number % len(SIDES)]:
            begin = time.monotonic()
            load.append(os.getloadavg()[0])
            try:
                workers, kept[side] = run(side, args, output.with_suffix("") / f"{side}-{number}")
                found = of_run(workers)
            except JobFailed as error:
                print(f"overhead.py: {error}", file=sys.stderr)
                return 1
            runs[side].append(found)
            median, processor = (statistics.median(found[key]) * 1000 for key in ("seconds", "processor_seconds"))
            console.print(f"round {number + 1}, {side}: {median:.0f} ms an iteration, {processor:.0f} ms of processor "
                          f"time ({time.monotonic() - begin:.0f} s)")
    record: dict[str, Any] = {
        "grid": {"pipelines": PIPELINES, "stages": STAGES, "microbatches": MICROBATCHES},
        "backend": args.backend, "width": args.width, "batch": args.batch, "step": args.step,
        "processors": os.cpu_count(), "load_before_each_run": load,
        "ratio": ratios(runs, "seconds"), "processor_ratio": ratios(runs, "processor_seconds"), "kept_bytes": kept,
        "runs": runs,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=2) + "\n")
    show(runs, console)
    for side, own in kept.items():
        if own:
            sizes = ", ".join(f"{name} {size / 2**20:.2f}" for name, size in own.items())
            print(f"{side} keeps on a worker, in MiB: {sizes}")
    print(f"fast takes {record['ratio']['fast']:.3f} times stock's iteration time, exact "
          f"{record['ratio']['exact']:.3f}; every number in {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
