"""Lent layers on paper: what failures cost re-routing, layers moved for good, and layers lent to neighbours.

    python scripts/bench/lending.py [--grids 3x4x6 ...] [--failures TEXT] [--layers 4 8] [--work ACTIONS]

Planned, not measured: periods of legal plans, by the exact steady state of their orders. Costs of a stage are 20, 22
and 18 units (forward, gradient of the input, gradient of the weights) and nothing else; a worker holds 1.5 S
micro-batches. Throughput is relative to our own plan of the same grid without a failure and without lent layers.

* route: re-routing to peers, as ReCycle does it.
* moved: layers change their stage for good, alike in all pipelines, as ElasWave and ResiHP do it; the partition with
  the best of the plans found. Without the copies of optimizer state that this takes.
* lent h: at most h layers of each boundary are also held by the neighbours, and each micro-batch crosses where the plan
  says. "at once" is the plan of the first moment, with its time.
* moves+lent h: besides, healthy workers have changed their stage where that pays within 100 iterations.
* V lent h: as lent h, with two chunks on each worker, down the stages and up again (h of the most that was asked for).
* limit: the same work on the workers that are left, without any bubble.
* share: throughput without a failure, times the share of workers that are left.

Failures: none; one worker; two of different stages; two of one stage; a host (one pipeline's workers); 5 % and 10 % of
all workers, drawn. Prints a line per row and writes runs/bench/lending.json; `scripts/figures/lent_layers.py` then
draws. Seconds are of this machine.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_recycle.plan import Costs, Grid, Plan, Problem, Worker, check, lower_bound
from megatron_recycle.planner import lent_schedules, plan_for, quick
from megatron_recycle.planner.instance import build, plan_of
from megatron_recycle.planner.normalise import moved as moved_workers
from megatron_recycle.planner.normalise import normalise

GRIDS = ("3x4x6", "4x4x8", "8x8x16", "16x8x32", "32x8x32")
UNITS = (20, 22, 18)
CAP = 1.5
#: partitions whose plans are looked at, of those with the best bounds
PARTITIONS = 6
WORK = 200_000
Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A grid of stages of ``layers`` layers each; a unit of the benchmark's costs is so many of the problem's."""

    pipelines: int
    stages: int
    microbatches: int
    layers: int

    @classmethod
    def parse(cls, grid: str, layers: int) -> Shape:
        """Read ``3x4x6``."""
        return cls(*map(int, grid.split("x")), layers)

    def problem(self, failed: Sequence[Worker] = (), lend: int = 0, sizes: Sequence[int] = ()) -> Problem:
        """The planner's problem; ``sizes``: layers of each stage (default: all alike)."""
        sizes = tuple(sizes) or (self.layers,) * self.stages
        grid = Grid(self.stages, (self.microbatches,) * self.pipelines)
        costs = Costs(*(tuple(unit * n for n in sizes) for unit in UNITS), layer=(UNITS,) * self.stages)
        return Problem(
            grid, costs, tuple(failed), cap=dict.fromkeys(grid.workers(), int(CAP * self.stages) * self.layers),
            before_b=sizes, after_b=sizes, layers=sizes,
            lend=tuple((min(lend, a), min(lend, b)) for a, b in pairwise(sizes)),
            layer_held=((1, 1),) * self.stages)

    def vee(self, failed: Sequence[Worker], lend: int) -> Problem:
        """The problem with two chunks of half a stage's layers on each worker, down the stages and up again."""
        half, chunks = self.layers // 2, 2 * self.stages
        placement = (*range(self.stages), *reversed(range(self.stages)))
        plain = self.problem(failed)
        costs = Costs(*((unit * half,) * chunks for unit in UNITS), layer=(UNITS,) * chunks)
        return Problem(
            plain.grid, costs, plain.failed, cap=plain.cap, before_b=(half,) * chunks, after_b=(half,) * chunks,
            placement=placement, layers=(half,) * chunks, layer_held=((1, 1),) * chunks,
            lend=tuple((0, 0) if one == other else (min(lend, half),) * 2 for one, other in pairwise(placement)))

    def limit(self, failed: Sequence[Worker]) -> float:
        """The period of the same work without a bubble, on the workers that are left."""
        work = sum(UNITS) * self.layers * self.stages * self.pipelines * self.microbatches
        return work / (self.pipelines * self.stages - len(failed))


def damages(shape: Shape) -> Iterator[tuple[str, tuple[Worker, ...]]]:
    """Names of failures and the workers that they take."""
    half, last = shape.stages // 2, shape.stages - 1
    yield "none", ()
    yield "one", (Worker(0, half),)
    yield "two, stages", (Worker(0, half), Worker(0, last))
    yield "two, same", (Worker(0, half), Worker(1, half))
    yield "host", tuple(Worker(0, s) for s in range(shape.stages))
    for percent in (5, 10):
        count = round(shape.pipelines * shape.stages * percent / 100)
        if count > 2:
            yield f"{percent} %", drawn(shape, count, 0)


def drawn(shape: Shape, count: int, seed: int) -> tuple[Worker, ...]:
    """``count`` workers of a seeded draw; a larger count takes the same ones and more. Each stage keeps one."""
    workers = list(shape.problem().grid.workers())
    random.Random(seed).shuffle(workers)
    left = [shape.pipelines] * shape.stages
    found: list[Worker] = []
    for worker in workers:
        if len(found) < count and left[worker.stage] > 1:
            left[worker.stage] -= 1
            found.append(worker)
    return tuple(found)


def moved(shape: Shape, failed: Sequence[Worker], work: int) -> tuple[Plan, tuple[int, ...]]:
    """The best plan found with layers moved for good, and the layers of each stage."""
    def bound(sizes: tuple[int, ...]) -> int:
        return lower_bound(shape.problem(failed, 0, sizes))

    known = {(shape.layers,) * shape.stages: bound((shape.layers,) * shape.stages)}
    looked: set[tuple[int, ...]] = set()
    while True:
        ahead = [sizes for sizes in sorted(known, key=lambda sizes: (known[sizes], sizes))[:PARTITIONS]
                 if sizes not in looked]
        if not ahead:
            break
        looked.add(ahead[0])
        for giver in range(shape.stages):
            for taker in range(shape.stages):
                sizes = list(ahead[0])
                sizes[giver] -= 1
                sizes[taker] += 1
                if giver != taker and sizes[giver] and tuple(sizes) not in known:
                    known[tuple(sizes)] = bound(tuple(sizes))
    best = sorted(known, key=lambda sizes: (known[sizes], sizes))[:PARTITIONS]
    plans = [(quick(shape.problem(failed, 0, sizes)), sizes) for sizes in best]
    plan, sizes = min(plans, key=lambda found: found[0].period)
    return min(plan, plan_for(shape.problem(failed, 0, sizes), work=work // 4), key=lambda found: found.period), sizes


def searched(problem: Problem, known: Plan, work: int) -> Plan:
    """The best plan with lent layers that so much work finds, or the one that is known where none is better."""
    instance = build(problem)
    found = lent_schedules.search(instance, work).best
    if found is None or found.period >= known.period:
        return known
    return plan_of(instance, found, lower_bound(problem), "portfolio")


def _period(plan: Plan) -> float:
    return plan.period


def measure(shape: Shape, name: str, failed: tuple[Worker, ...], whole: Plan, lends: Sequence[int], work: int) -> Row:
    """All figures of a row: throughputs relative to ``whole``, and seconds."""
    clock = time.perf_counter()
    row: Row = {"grid": f"{shape.pipelines}x{shape.stages}x{shape.microbatches}", "layers": shape.layers,
                "failures": name, "gone": len(failed), "failed": [str(worker) for worker in failed],
                "period_whole": whole.period / shape.layers}

    def note(what: str, plan: Plan) -> None:
        nonlocal clock
        row[what] = round(whole.period / check(plan).period, 4)
        row[f"{what} period"] = plan.period / shape.layers
        row[f"{what} s"] = round(time.perf_counter() - clock, 3)
        clock = time.perf_counter()

    rerouted = plan_for(shape.problem(failed), work=work) if failed else whole
    note("route", rerouted)
    plan, sizes = moved(shape, failed, work) if failed else (whole, (shape.layers,) * shape.stages)
    note("moved", plan)
    row["moved layers"] = sizes
    for lend in lends:
        problem = shape.problem(failed, lend)
        at_once = quick(problem) if failed else whole
        note(f"at once {lend}", at_once)
        plan = searched(problem, min(rerouted, at_once, key=_period), work) if failed else whole
        note(f"lent {lend}", plan)
        row[f"lent {lend} crossing"] = round(len(plan.crossings) / shape.problem().grid.total, 3)
        moves = normalise(problem)
        if moves:
            problem = moved_workers(problem, moves)
            rerouted = plan_for(replace(problem, lend=()), work=work // 4)
            plan = min(plan, searched(problem, rerouted, work), key=lambda found: found.period)
        note(f"moves+lent {lend}", plan)
        row[f"moves {lend}"] = len(moves)
    if shape.layers % 2 == 0:
        problem = shape.vee(failed, max(lends))
        at_once = quick(problem)
        note(f"V at once {max(lends)}", at_once)
        note(f"V lent {max(lends)}", searched(problem, at_once, work) if failed else plan_for(problem, work=work))
    row["limit"] = round(whole.period / shape.limit(failed), 4)
    row["share"] = round(1 - len(failed) / (shape.pipelines * shape.stages), 4)
    return row


def main() -> int:
    """Print the table and write its raw numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="+", default=list(GRIDS), metavar="DxSxM")
    parser.add_argument("--failures", default="", metavar="TEXT", help="only failures with this text, as in 'two'")
    parser.add_argument("--layers", nargs="+", type=int, default=[4, 8], help="layers of a stage (default 4 and 8)")
    parser.add_argument("--lend", nargs="+", type=int, default=[1, 2], help="most layers at a boundary (1 2)")
    parser.add_argument("--work", type=int, default=WORK,
                        help=f"actions that each search schedules (default {WORK}: ten minutes for all)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/lending.json"))
    args = parser.parse_args()
    print("planned, not measured; throughput relative to our own plan without a failure\n")
    lent_columns = "".join(f"{f'at once {h}':>18} {f'lent {h}':>16} {f'moves+lent {h}':>16}"
                           for h in args.lend)
    print(f"{'grid':>8} {'L':>2} {'failures':>12} {'gone':>4} {'route':>16} {'moved':>16} {lent_columns}"
          f" {f'V lent {max(args.lend)}':>16}  limit  share")
    table: list[Row] = []
    for grid in args.grids:
        for layers in args.layers:
            shape = Shape.parse(grid, layers)
            whole = plan_for(shape.problem(), work=args.work)
            for name, failed in damages(shape):
                if args.failures not in name:
                    continue
                row = measure(shape, name, failed, whole, args.lend, args.work)
                table.append(row)
                columns = [cell(row, "route", 16), cell(row, "moved", 16)]
                for lend in args.lend:
                    columns += [cell(row, f"at once {lend}", 18), cell(row, f"lent {lend}", 16),
                                cell(row, f"moves+lent {lend}", 16)]
                columns.append(cell(row, f"V lent {max(args.lend)}", 16) if layers % 2 == 0 else " " * 16)
                print(f"{grid:>8} {layers:>2} {name:>12} {len(failed):>4} {' '.join(columns)}  {row['limit']:.3f}"
                      f"  {row['share']:.3f}", flush=True)
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps({"work": args.work, "rows": table}, indent=1) + "\n")
    print(f"\nwritten to {args.out}")
    return 0


def cell(row: Row, what: str, width: int) -> str:
    """Throughput, and in brackets the seconds that the plan took."""
    return f"{row[what]:.3f} ({row[f'{what} s']:.2f} s)".rjust(width)


if __name__ == "__main__":
    raise SystemExit(main())
