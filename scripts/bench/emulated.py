"""Stock DeepSpeed (or Megatron-Core) and megatron-recycle, side by side, on stages that sleep instead of computing.

Two cores cannot show pipeline parallelism with real arithmetic, so a stage's forward, input gradient and weight
gradient sleep for given times; processes, tensors between them, engines and failures (SIGKILL) are real.
Every row is a job of its own, in turn; a row's figure is the median over workers of the median of the last
iterations. Stock runs under torchrun, without anything of ours; what 1F1B takes in theory stands beside what it takes.
Prints a table, with each row's aim and whether it is met, and writes runs/bench/emulated.json (or
emulated-megatron.json). A row that does not come to its end is said, and the next one begins.

    scripts/bench/emulated.py [--backend megatron] [--grid 3x4x6 ...] [--unit 0.005] [--rows 'lent;re-routing']
        [--seconds 480] [--step staggered]

Rows "layers moved" stand for published repartitions, which move layers to other stages after a failure, for good: the
job has them there from the beginning on, so that moving costs nothing, and the failure is then re-routed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from emulated_rows import AIMS, BACKENDS, NEAR, ROWS, B, F, Row, Shape, W  # beside this script
from jobs import SCRIPTS, Job, JobFailed, exit_on_sigterm, under_torchrun
from rich.console import Console
from rich.table import Table

ITERATIONS, MEASURED, KILL_AFTER = 14, 5, 1
PARAMETERS = 64
"""Of a layer."""
OUT = Path("runs/bench")
DEFAULT_STEP = {"deepspeed": "staggered", "megatron": "barrier"}


@dataclass
class Measured:
    """Figures of a job, in units."""

    row: Row
    period: float
    planned: float | None
    bound: float | None
    source: str
    block: int
    per_worker: dict[str, list[float]]
    weights: dict[str, list[float]]
    lending: str = ""
    load: float = 0.0
    problems: list[str] = field(default_factory=list)


def measure(row: Row, shape: Shape, unit: float, backend: str) -> Measured:
    """Run one job and read what its workers wrote."""
    folder = OUT / name_of(backend) / f"{shape}-{row.name.replace(' ', '-').replace(',', '')}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("worker-*.json"):
        old.unlink()
    arguments = ["--pipelines", shape.pipelines, "--stages", shape.stages, "--microbatches", shape.microbatches,
                 "--seconds", F * unit, B * unit, W * unit, "--iterations", ITERATIONS,
                 "--clipping", row.clipping, "--out", folder.resolve()]
    sizes = shape.sizes(row)
    # Few: bandwidth is known from messages of 256 bytes, by which copies of larger layers would seem to take long.
    arguments += ["--parameters", PARAMETERS]
    arguments += ["--layers", *sizes] if backend == "deepspeed" else ["--layers", row.layers, "--chunks", row.chunks]
    limit = 60 + 3 * ITERATIONS * shape.theory * unit
    words = [str(value) for value in arguments]
    plan, lasts = ({}, 0) if row.settings is None else ours(row, shape, sizes, words, folder / "run", limit, backend)
    if row.settings is None:
        stock([str(SCRIPTS / "bench" / BACKENDS[backend]), *words], folder, shape.pipelines * shape.stages, limit)
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("worker-*.json"))]
    found = read(row, shape, unit, results, plan, backend)
    if lasts > ITERATIONS - MEASURED:
        found.problems.append(f"the plan came with iteration {lasts}: give it more, or less --budget")
    return found


def stock(command: list[str], folder: Path, workers: int, limit: float) -> None:
    """The training script without anything of ours. Raises JobFailed."""
    with under_torchrun(command, folder, workers) as child:
        if status := child.wait(limit):
            raise JobFailed(f"stock ended with {status}: see {child.log}")
        if status is None:
            raise JobFailed(f"stock takes longer than {limit:.0f} s: see {child.log}")


def ours(row: Row, shape: Shape, sizes: tuple[int, ...], arguments: list[str], folder: Path, limit: float,
         backend: str) -> tuple[dict[str, Any], int]:
    """The training script under `recycle run`, with the row's failure: the event of its last plan, and the iteration
    that this one came with. Raises JobFailed."""
    costs = ";".join(f"{F * size // row.chunks},{B * size // row.chunks},{W * size // row.chunks}"
                     for size in (sizes if row.chunks == 1 else (row.layers,)))
    settings = {"costs": costs, "cap": str(shape.cap * row.chunks), "planner_budget": "4", **(row.settings or {})}
    lasts = 0
    killed = False
    plan: dict[str, Any] = {}
    plans: dict[str, dict[str, Any]] = {}
    with Job(f"bench/{BACKENDS[backend]}", arguments, folder, shape.pipelines * shape.stages, settings, limit) as job:
        for event in job.events():
            if event["event"] == "planned":
                plans[event["digest"]] = dict(event)
                plan = plan if plan.get("generation") == event["generation"] else dict(event)
            elif event["event"] == "adopted":
                plan, lasts = plans[event["digest"]], event["iteration"]
            elif event["event"] == "committed" and event["iteration"] == KILL_AFTER and not killed:
                killed = True
                for victim in shape.victims(row.gone):
                    job.kill(victim)
        job.check_ended_well()
    return plan, lasts


def name_of(backend: str) -> str:
    """Name of the report and of the folder beside it."""
    return "emulated" if backend == "deepspeed" else f"emulated-{backend}"


def read(row: Row, shape: Shape, unit: float, results: list[dict[str, Any]], plan: dict[str, Any],
         backend: str) -> Measured:
    per_worker = {}
    for result in results:
        ends = result["ends"]
        times = [(after - before) / unit for before, after in pairwise(ends)]
        per_worker[f"{result['pipeline']}:{result['stage']}"] = [round(time, 1) for time in times]
    period = statistics.median(statistics.median(times[-MEASURED:]) for times in per_worker.values())
    exact = row.settings is not None and row.settings.get("reduction") == "exact"
    step = (row.settings or {}).get("step", DEFAULT_STEP[backend])
    measured = Measured(
        row, round(period, 1), *(plan[key] / row.layers if key in plan else None for key in
                                 ("makespan" if step == "barrier" else "period", "lower_bound")),
        plan.get("source", ""), -(-shape.microbatches // max(1, shape.pipelines - 1)) if exact else 0, per_worker,
        {number: values for result in results for number, values in result["weights"].items()},
        plan.get("stats", {}).get("lending", ""), os.getloadavg()[0])
    if len(results) != shape.pipelines * shape.stages - len(shape.victims(row.gone)):
        measured.problems.append(f"{len(results)} workers wrote a result")
    measured.problems += miscounted(row, shape, results)
    return measured


def miscounted(row: Row, shape: Shape, results: list[dict[str, Any]]) -> list[str]:
    """Numbers of micro-batches that were not run exactly once by each layer in every measured iteration."""
    if row.clipping and row.settings is not None:
        return []  # work thrown away with a wrong step is done twice
    counts = Counter((kind, number) for result in results for kind, number in result["ran"])
    per_iteration = shape.pipelines * shape.microbatches
    # A victim took its own counts along; and the plugin runs each worker's first forward twice.
    first = ITERATIONS - MEASURED if row.gone else 0 if row.settings is None else 1
    layers = len({number for result in results for number in result["weights"]})
    return [f"{kind} of micro-batch {number} ran in {counts[kind, number]} layers, not {layers}"
            for kind in "FBW" for number in range(first * per_iteration, ITERATIONS * per_iteration)
            if counts[kind, number] != layers]


def show(console: Console, shape: Shape, unit: float, rows: list[Measured]) -> None:
    stock = {bool(m.row.clipping): m.period for m in rows if m.row.settings is None}
    own = whole(rows)
    table = Table(title=f"{shape}: F/B/W {F}/{B}/{W} units of {1000 * unit:g} ms, cap {shape.cap}; "
                        f"1F1B in theory {shape.theory}")
    for heading in ("", "measured", "planned", "bound", "over plan", "of 1F1B\nin theory", "of stock\nmeasured",
                    "of ours\nwhole", "aim", "plan", "block"):
        table.add_column(heading, justify="left" if heading in ("", "plan", "aim") else "right")
    for m in rows:
        planned = shape.theory if m.row.settings is None else m.planned
        base = stock.get(bool(m.row.clipping))
        table.add_row(m.row.name, f"{m.period:.1f}", f"{planned:g}" if planned else "",
                      f"{m.bound:g}" if m.bound else "", f"{100 * (m.period / planned - 1):+.1f} %" if planned else "",
                      f"{shape.theory / m.period:.3f}", f"{base / m.period:.3f}" if base else "",
                      f"{own / m.period:.3f}" if own else "", "; ".join(judged(m, shape, own)), m.source,
                      str(m.block or ""))
    console.print(table)
    for m in rows:
        for problem in m.problems[:3]:
            console.print(f"[red]{m.row.name}: {problem}")


def whole(rows: list[Measured]) -> float | None:
    """Our own period without a failure, if it was measured."""
    return next((m.period for m in rows if m.row.name == "ours"), None)


def judged(m: Measured, shape: Shape, own: float | None) -> list[str]:
    """What the row was to reach, and whether it has. ``own``: our own period without a failure, if it was measured."""
    said = []
    if (str(shape), m.row.name) in AIMS:
        against, least = AIMS[str(shape), m.row.name]
        base = {"ours": own, "1F1B": shape.theory}[against]
        met = "not known: measure the row 'ours' too" if base is None else _met(base / m.period >= least)
        said.append(f"{least} of {against}: {met}")
    if m.planned and m.row.settings is not None:
        said.append(f"plan + {100 * NEAR:g} %: {_met(m.period <= (1 + NEAR) * m.planned)}")
    return said


def _met(yes: bool) -> str:
    return "met" if yes else "NOT MET"


def disagreement(rows: list[Measured]) -> float:
    """Largest relative difference of a layer's parameters between stock and any other row without clipping."""
    stock = next((m for m in rows if m.row.settings is None and not m.row.clipping), None)
    if stock is None:
        return 0.0
    return max((abs(a - b) / abs(a) for m in rows if not m.row.clipping for layer, values in m.weights.items()
                for a, b in zip(stock.weights.get(layer, ()), values)), default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="deepspeed")
    parser.add_argument("--grid", nargs="+", type=Shape.parse, default=[Shape(2, 2, 4), Shape(3, 4, 6), Shape(4, 4, 8)])
    parser.add_argument("--unit", type=float, default=0.005,
                        help="seconds; scaled up until stock is within 2 %% of theory")
    parser.add_argument("--seconds", type=float, default=0.0,
                        help="rows that would not end within so much time are left out, and said so; units stay as "
                             "they are (default: all rows, however long)")
    parser.add_argument("--rows", help="only these rows, separated by ; (a text that is no row's name: all rows that "
                                       "contain it)")
    parser.add_argument("--step", choices=("staggered", "barrier"),
                        help="of all rows that do not say it (default: the backend's)")
    args = parser.parse_args()
    exit_on_sigterm()
    console = Console(width=None if sys.stdout.isatty() else 160)  # a log file is no 80-column screen
    names = {row.name for row in ROWS}
    chosen = [row for row in ROWS if not args.rows or any(
        part == row.name if part in names else part in row.name for part in args.rows.split(";"))]
    if args.backend != "deepspeed":
        chosen = [row for row in chosen if not row.moved]
    if args.step:
        chosen = [row if row.settings is None else replace(row, settings={"step": args.step, **row.settings})
                  for row in chosen]
    report, failed, began, longest = {}, False, time.monotonic(), 0.0
    for shape in args.grid:
        unit = args.unit
        since = time.monotonic()
        first = measure(ROWS[0], shape, unit, args.backend)
        longest = max(longest, time.monotonic() - since)
        while first.period > 1.02 * shape.theory and unit < 4 * args.unit and not args.seconds:
            unit *= 1.5
            console.print(f"{shape}: stock took {first.period:.1f} units, theory says {shape.theory}; "
                          f"again with units of {1000 * unit:g} ms")
            first = measure(ROWS[0], shape, unit, args.backend)
        rows = [first]
        for row in chosen:
            if row == ROWS[0] or not shape.has(row):
                continue
            if args.seconds and time.monotonic() - began + longest > args.seconds:
                console.print(f"{shape}: {row.name}: left out, for want of time")
                continue
            since = time.monotonic()
            try:
                rows.append(measure(row, shape, unit, args.backend))
            except JobFailed as error:
                console.print(f"[red]{shape}: {row.name}: {error}")
                failed = True
                continue
            longest = max(longest, time.monotonic() - since)
            console.print(f"{shape}: {row.name}: {rows[-1].period:.1f} units (planned {rows[-1].planned}; load "
                          f"{rows[-1].load:.0f}; {time.monotonic() - since:.0f} s) {rows[-1].lending}")
        show(console, shape, unit, rows)
        apart = disagreement(rows)
        console.print(f"parameters of all rows agree within {apart:.1e} (relative)")
        failed |= apart > 1e-5 or any(m.problems for m in rows)
        report[str(shape)] = {"unit_seconds": unit, "theory_1f1b": shape.theory, "cap": shape.cap,
                              "parameters_apart": apart, "rows": [{
                                  "name": m.row.name, "settings": m.row.settings, "gone": m.row.gone,
                                  "moved": m.row.moved, "lending": m.lending, "load": m.load,
                                  "clipping": m.row.clipping, "measured": m.period, "planned": m.planned,
                                  "bound": m.bound, "source": m.source, "block": m.block,
                                  "aims": judged(m, shape, whole(rows)),
                                  "per_worker": m.per_worker, "problems": m.problems} for m in rows]}
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / f"{name_of(args.backend)}.json").write_text(json.dumps(report, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
