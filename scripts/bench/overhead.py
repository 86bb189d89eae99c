#!/usr/bin/env python3
"""The cost of the plugin while nothing fails: iterations of the quickstart's job against the stock engine.

    python scripts/bench/overhead.py                      # 3 rounds of 40 iterations of stock, fast, exact
    python scripts/bench/overhead.py --backend megatron   # stock is megatron-core's own 1F1B
    python scripts/bench/overhead.py --logs               # each reduction without kept messages, and with them

Each round starts the backend's script three times: the stock framework under torchrun, the plugin with `reduction:
fast` and with `reduction: exact` under `recycle run`. All read their data in the training process (DeepSpeed would
start two loader processes per worker otherwise), with one thread each. Then they train in turns, one iteration of one
job at a time: a shared machine may be half as fast a minute later, but hardly a second later.

Per side: the median time of an iteration, and of the processor time that all workers together spend on one (without
the coordinator and the launchers). The ratio to stock is the median, over all turns, of the ratio to stock's iteration
of the same turn; half of the turns lie between the quartiles. For the plugin's sides also the memory that a worker
keeps besides parameters and optimizer: sums of gradients (`exact` keeps several apart), the reduced gradient, and the
copy to undo a step. Prints a table and writes runs/bench/overhead.json with every iteration's numbers.

With `--logs` there is no stock side. A side "fast, log" is compared with "fast", which keeps no messages
(`keep_messages: none`): the difference is the cost of the log and of closing stages, as processor time of a worker.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs import SCRIPTS, Job, JobFailed, exit_on_sigterm, under_torchrun

PIPELINES, STAGES, MICROBATCHES = 3, 2, 4
WORKERS = PIPELINES * STAGES
SIDES: Mapping[str, Mapping[str, str]] = {"stock": {}, "fast": {"reduction": "fast"}, "exact": {"reduction": "exact"}}
"""Settings of the plugin by side; stock has none."""
LOG = ", log"
LOGS = {f"{side}{log}": {"reduction": side, "keep_messages": keep} for side in ("fast", "exact")
        for log, keep in (("", "none"), (LOG, "all"))}
TRAINING = {"deepspeed": "gpt_deepspeed.py", "megatron": "pretrain_gpt_megatron.py"}
"""Backend -> the training script that runs on it."""
IN_TURNS = Path(__file__).resolve().parent / "in_turns.py"
SKIPPED = 5
"""First iterations of a round that do not count."""
KEYS = {"seconds": "iteration", "processor_seconds": "processor time"}

Kept = dict[str, int]
"""Most bytes that a worker keeps, by purpose."""

Taken = dict[str, list[float]]
"""Seconds of each iteration of a side, and the processor seconds of all workers."""


class Turns:
    """Tells the workers of all sides when to run their next iteration, and hears its times."""

    def __init__(self, limit: float) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(limit)
        self._limit = limit
        self._workers: dict[str, list[tuple[socket.socket, IO[bytes]]]] = {}
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"

    def gather(self, sides: Sequence[str]) -> None:
        """Wait until all workers of all sides are there. Raises JobFailed."""
        for _ in range(len(sides) * WORKERS):
            try:
                line, _ = self._server.accept()
            except TimeoutError:
                there = {side: len(workers) for side, workers in self._workers.items()}
                raise JobFailed(f"not all workers have come: {there}") from None
            line.settimeout(self._limit)
            reader = line.makefile("rb")
            self._workers.setdefault(reader.readline().decode().strip(), []).append((line, reader))

    def give(self, side: str) -> tuple[float, float]:
        """One iteration of a side: its seconds (the slowest worker's), and all workers' processor seconds. Raises
        JobFailed."""
        for line, _ in self._workers[side]:
            line.sendall(b"!")
        try:
            took = [json.loads(reader.readline()) for _, reader in self._workers[side]]
        except (ValueError, OSError) as error:
            raise JobFailed(f"a worker of {side} has ended, or takes too long: {error}") from None
        return max(wall for wall, _ in took), sum(processor for _, processor in took)

    def close(self) -> None:
        for line, _ in [connection for workers in self._workers.values() for connection in workers]:
            line.close()
        self._server.close()


def base(side: str, sides: Mapping[str, object]) -> str:
    """The side that this one is compared with."""
    return "stock" if "stock" in sides else side.removesuffix(LOG)


def one_round(number: int, args: argparse.Namespace, folder: Path) -> tuple[dict[str, Taken], dict[str, Kept]]:
    """Start all sides once; returns the times of each side's iterations and the bytes that the plugin keeps. Raises
    JobFailed."""
    arguments = ["--iterations", str(args.iterations + SKIPPED), "--stages", str(STAGES), "--microbatches",
                 str(MICROBATCHES), "--width", str(args.width), "--batch", str(args.batch)]
    script, sides = str(SCRIPTS / TRAINING[args.backend]), [*args.sides]
    taken: dict[str, Taken] = {side: {key: [] for key in KEYS} for side in sides}
    with ExitStack() as stack:
        turns = Turns(args.limit)
        stack.callback(turns.close)
        extra = ["--in-process-data"] if args.backend == "deepspeed" else []
        stock = stack.enter_context(under_torchrun(
            [str(IN_TURNS), turns.address, "stock", script, *arguments, *extra], folder / "stock",
            WORKERS)) if "stock" in sides else None
        jobs = {side: stack.enter_context(Job(
            str(IN_TURNS), [turns.address, side, script, *arguments], folder / side.replace(", ", "-"), WORKERS,
            {**args.sides[side], "step": args.step}, args.limit)) for side in sides if side != "stock"}
        turns.gather(sides)
        for turn in range(args.iterations + SKIPPED):
            first = (turn + number) % len(sides)
            for side in sides[first:] + sides[:first]:
                found = turns.give(side)
                if turn >= SKIPPED:
                    for key, value in zip(KEYS, found):
                        taken[side][key].append(value)
        if stock is not None and (status := stock.wait(args.limit)):
            raise JobFailed(f"stock ended with {status}: see {stock.log}")
        return taken, {side: kept_by(job) for side, job in jobs.items()}


def kept_by(job: Job) -> Kept:
    """Bytes kept by the workers of a job that is about to end, as they report them. Raises JobFailed."""
    kept: Kept = {}
    for event in job.events():
        for own in event.get("kept", {}).values():
            kept = {name: max(size, kept.get(name, 0)) for name, size in own.items()}
    job.check_ended_well()
    return kept


def each_turn(runs: Sequence[Mapping[str, Taken]], side: str, key: str) -> list[float]:
    """A side's iterations divided by those of the same turn of the side that it is compared with."""
    return [own / other for run in runs for own, other in zip(
        run[side][key], run[base(side, run)][key], strict=True)]


def ratios(runs: Sequence[Mapping[str, Taken]], key: str) -> dict[str, float]:
    return {side: statistics.median(each_turn(runs, side, key)) for side in runs[0]}


def log_costs(runs: Sequence[Mapping[str, Taken]]) -> dict[str, float]:
    """Milliseconds of a worker's processor time for the log and closing, in an iteration, by the log's side: the
    median of the differences of all turns."""
    key = "processor_seconds"
    return {side: 1000 / WORKERS * statistics.median(
        own - other for run in runs for own, other in zip(run[side][key], run[base(side, run)][key], strict=True))
        for side in runs[0] if side.endswith(LOG)}


def show(runs: Sequence[Mapping[str, Taken]], console: Console) -> None:
    table = Table("", *[head for name in KEYS.values() for head in (name, "ratio", "quartiles")])
    for side in runs[0]:
        cells = [side]
        for key in KEYS:
            median = statistics.median(value for run in runs for value in run[side][key])
            low, middle, high = statistics.quantiles(each_turn(runs, side, key), n=4)
            cells += [f"{median * 1000:.0f} ms", f"{middle:.3f}", f"{low:.2f} to {high:.2f}"]
        table.add_row(*cells)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=40, help="that count, of each side in each round")
    parser.add_argument("--width", type=int, default=96, help="of the model")
    parser.add_argument("--batch", type=int, default=4, help="windows per micro-batch")
    parser.add_argument("--backend", choices=tuple(TRAINING), default="deepspeed")
    parser.add_argument("--step", choices=("staggered", "barrier"), help="default: staggered; Megatron: barrier")
    parser.add_argument("--logs", dest="sides", action="store_const", const=LOGS, default=SIDES,
                        help="compare with and without kept messages, instead of with stock")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for each round")
    parser.add_argument("--output", type=Path, help="default: runs/bench/overhead.json, with "
                        "-megatron and -logs in its name")
    args = parser.parse_args()
    if args.step is None:
        args.step = "barrier" if args.backend == "megatron" else "staggered"
    if args.output is None:
        backend, logs = "" if args.backend == "deepspeed" else f"-{args.backend}", "-logs" * (args.sides is LOGS)
        args.output = Path("runs/bench") / f"overhead{backend}{logs}.json"
    exit_on_sigterm()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    output = args.output.absolute()
    runs: list[dict[str, Taken]] = []
    kept: dict[str, Kept] = {}
    for number in range(args.rounds):
        begin = time.monotonic()
        try:
            taken, kept = one_round(number, args, output.with_suffix("") / str(number))
        except JobFailed as error:
            print(f"overhead.py: {error}", file=sys.stderr)
            return 1
        runs.append(taken)
        medians = ", ".join(f"{side} {statistics.median(each_turn([taken], side, 'processor_seconds')):.3f}"
                            for side in taken if side != base(side, taken))
        console.print(f"round {number + 1}: ratios of processor time: {medians} ({time.monotonic() - begin:.0f} s)")
    record: dict[str, Any] = {
        "grid": {"pipelines": PIPELINES, "stages": STAGES, "microbatches": MICROBATCHES},
        "backend": args.backend, "width": args.width, "batch": args.batch, "step": args.step,
        "processors": os.cpu_count(),
        "ratio": ratios(runs, "seconds"), "processor_ratio": ratios(runs, "processor_seconds"), "kept_bytes": kept,
        "log_ms": log_costs(runs), "load": os.getloadavg()[0],
        "runs": runs,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=2) + "\n")
    show(runs, console)
    for side, own in kept.items():
        sizes = ", ".join(f"{name} {size / 2**20:.2f}" for name, size in own.items())
        print(f"{side} keeps on a worker, in MiB: {sizes}")
    for side, cost in record["log_ms"].items():
        print(f"{side.removesuffix(LOG)}: log and closing take {cost:.1f} ms of a worker's processor time an iteration")
    if args.sides is SIDES:
        print(f"fast takes {record['processor_ratio']['fast']:.3f} times stock's processor time, exact "
              f"{record['processor_ratio']['exact']:.3f}")
    print(f"every number in {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
