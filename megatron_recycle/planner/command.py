"""``recycle plan``: plan a grid with failed workers, compare techniques, or check a plan file."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import replace

from megatron_recycle.planner.baselines import TECHNIQUES, planned, shaped

from ..plan import Costs, Grid, Plan, PlanError, Problem, Worker, check
from . import terminal
from .normalise import Prices, moved, normalise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``recycle plan``."""
    grid = parser.add_argument_group("the grid")
    grid.add_argument("--pipelines", type=int, metavar="D", help="number of pipelines")
    grid.add_argument("--stages", type=int, metavar="S", help="stages of each pipeline")
    grid.add_argument("--microbatches", metavar="M", help="micro-batches, one number or one per pipeline: 6 or 6,6,4")
    grid.add_argument("--chunks", type=int, choices=(1, 2), default=1,
                      help="chunks of layers per stage; 2: V-shaped, first down the stages and then up again, each"
                           " chunk half a stage (default 1)")
    grid.add_argument("--failed", action="extend", nargs="+", default=[], metavar="D:S",
                      help="failed workers, as pipeline:stage: 0:0 1:0, or separated by commas")
    grid.add_argument("--costs", metavar="F,B,W",
                      help="forward, input-gradient and weight-gradient time, one triple or one per stage,"
                           " separated by ';' (default 1,1,1; with --chunks 2 2,2,2, half of it for each chunk)")
    grid.add_argument("--step-cost", default="0", metavar="T", help="reduce-and-step, one number or one per stage")
    grid.add_argument("--hop-cost", default="0", metavar="T", help="latency of a transfer")
    grid.add_argument("--speed", action="extend", nargs="+", default=[], metavar="D:S=X",
                      help="worker D:S takes X times as long: 0:1=1.5 1:1=2, or separated by commas")
    grid.add_argument("--cap", metavar="N", help="activations a worker may hold, one number or one per stage"
                                                 " (default: S, or S - s for --technique none)")
    how = parser.add_argument_group("the plan")
    how.add_argument("--technique", choices=TECHNIQUES, default="staggered",
                     help="none: 1F1B without failures; adaptive: re-routing; decoupled: and split backward;"
                          " staggered: and staggered step; drop: hit pipelines left out")
    how.add_argument("--objective", choices=("period", "makespan"),
                     help="default: period for staggered and drop, else makespan")
    how.add_argument("--block", type=int, default=0, metavar="N",
                     help="micro-batches per block of the exact reduction (0: guests spread freely)")
    how.add_argument("--full-backward", action="store_true",
                     help="the first stage runs a B and a W that comes next as one (FB), as DeepSpeed jobs with"
                          " `reduction: fast` do; figures stay the same")
    how.add_argument("--no-moves", action="store_true", help="no worker moves to another stage")
    how.add_argument("--move-cost", type=float, default=1.0, metavar="K", help="iterations that a move costs")
    how.add_argument("--horizon", type=float, default=100.0, metavar="K",
                     help="iterations over which moves must pay off")
    how.add_argument("--budget", type=float, default=2.0, metavar="SECONDS", help="time for the search (default 2)")
    how.add_argument("--seed", type=int, default=0)
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print the plan file instead of a table")
    out.add_argument("--output", metavar="FILE", help="write the plan file")
    out.add_argument("--picture", metavar="FILE", help="write a picture of the schedule, .png or .svg")
    out.add_argument("--check", metavar="FILE", help="check a plan file and print its figures; plans nothing")


def run(args: argparse.Namespace) -> int:
    """Plan, or check a plan file. Returns 0; 1 if a running job would end there, since a stage has lost all its
    workers; or 2 after one line on standard error that names the fault."""
    try:
        if args.check:
            plan = check(Plan.load(args.check))
            extra, status = {"legal": "yes", "digest": plan.digest}, 0
        else:
            plan, extra, status = _plan(args)
        _show(plan, extra, args)
    except BrokenPipeError:
        raise  # the reader of standard output is gone
    except (PlanError, OSError) as error:
        print(f"recycle plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return status


def _plan(args: argparse.Namespace) -> tuple[Plan, dict[str, str], int]:
    """The plan, further lines for its table, and the exit status."""
    requested = problem = shaped(_problem(args), args.technique, args.objective)
    moves = {}
    if args.technique not in ("none", "drop") and not args.no_moves:
        moves = normalise(problem, Prices(args.move_cost, args.horizon))
        problem = moved(problem, moves)
    begin = time.perf_counter()
    first: list[Plan] = []
    plan = planned(problem, args.technique, args.budget, args.seed, first.append)
    total = time.perf_counter() - begin
    check(plan)
    if moves:
        plan = replace(plan, stats={**plan.stats, "moves": {str(mover): str(to) for mover, to in moves.items()}})
    extra = {"time to best plan": f"{total * 1000:.0f} ms"}
    if first:
        quickly = first[0].stats["first_seconds"] * 1000
        extra = {"time to first plan": f"{quickly:.1f} ms (orders; its {problem.objective}"
                                       f" {first[0].objective_value:g})", **extra}
    gone = [str(stage) for stage in range(requested.grid.stages) if not requested.live(stage)]
    if gone:
        extra["parameters"] = f"nobody holds those of stage {', '.join(gone)}: a running job ends here"
        print(f"recycle plan: parameters: {extra['parameters']}", file=sys.stderr)
    if plan.stats.get("cut"):
        extra["cut"] = "the clock ended the search before its work was done"
    return plan, extra, 1 if gone else 0


def _show(plan: Plan, extra: dict[str, str], args: argparse.Namespace) -> None:
    if args.output:
        try:
            plan.save(args.output)
        except OSError as error:
            raise PlanError(f"{args.output} cannot be written: {error.strerror}") from None
    if args.picture:
        from megatron_recycle.tools.timeline import draw

        draw(args.picture, (plan, ""))
    if args.json:
        print(json.dumps(plan.to_json()))
        return
    print(terminal.table(plan, extra))
    picture = terminal.drawing(plan, shutil.get_terminal_size((120, 40)).columns, sys.stdout.isatty())
    if picture:
        print("\n" + picture)


def _problem(args: argparse.Namespace) -> Problem:
    for name in ("pipelines", "stages", "microbatches"):
        if getattr(args, name) is None:
            raise PlanError(f"--{name} is needed (or --check FILE)")
    if args.pipelines < 1 or args.stages < 1:
        raise PlanError("--pipelines and --stages must be positive")
    for name in ("budget", "move_cost", "horizon", "seed"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise PlanError(f"--{name.replace('_', '-')} must not be negative, nor without limit")
    counts = _numbers(args.microbatches, "--microbatches", args.pipelines, "pipeline")
    grid = Grid(args.stages, counts)
    given = args.costs
    if given is None:
        given = "2,2,2" if args.chunks == 2 else "1,1,1"
    triples = [_numbers(part, "--costs", 3, "kind", spread=False) for part in given.split(";")]
    if len(triples) not in (1, args.stages):
        raise PlanError(f"--costs gives {len(triples)} stages, the grid has {args.stages}")
    triples = triples * args.stages if len(triples) == 1 else triples
    step = _numbers(args.step_cost, "--step-cost", args.stages, "stage")
    hop, = _numbers(args.hop_cost, "--hop-cost", 1, "grid", spread=False)
    forward, backward_input, backward_weight = zip(*triples)
    cap, placement = _caps(args, grid), ()
    if args.chunks == 2:
        if args.technique == "none":
            raise PlanError("--technique none is 1F1B, which has one chunk per stage: leave out --chunks")
        placement = (*range(args.stages), *reversed(range(args.stages)))
        if any(1 in triple for triple in triples):
            raise PlanError(f"--costs {given}: a cost of 1 cannot be halved between two chunks; give all costs in a"
                            " smaller unit")
        forward, backward_input, backward_weight = map(_halves, (forward, backward_input, backward_weight))
        cap = {worker: 2 * count for worker, count in cap.items()}
    costs = Costs(forward, backward_input, backward_weight, hop, step, _speeds(args.speed))
    return Problem(grid, costs, tuple(Worker.parse(w) for w in _list(args.failed)), cap=cap,
                   block=args.block, full_backward=(0,) if args.full_backward else (), placement=placement)


def _halves(costs: tuple[int, ...]) -> tuple[int, ...]:
    """Costs of stages, each split over its two chunks."""
    return (*(cost - cost // 2 for cost in costs), *(cost // 2 for cost in reversed(costs)))


def _caps(args: argparse.Namespace, grid: Grid) -> dict[Worker, int]:
    if args.cap is not None:
        row = _numbers(args.cap, "--cap", grid.stages, "stage")
    elif args.technique == "none":
        row = tuple(grid.stages - s for s in range(grid.stages))
    else:
        row = (grid.stages,) * grid.stages
    if min(row) < 1:
        raise PlanError("--cap must be at least 1: a worker that may hold no activation cannot work")
    return {worker: row[worker.stage] for worker in grid.workers()}


def _speeds(given: list[str]) -> dict[Worker, float]:
    speeds = {}
    for text in _list(given):
        worker, _, factor = text.partition("=")
        try:
            speeds[Worker.parse(worker)] = float(factor)
        except ValueError:
            raise PlanError(f"--speed {text!r} is not of the form D:S=X, for example 0:1=1.5") from None
    return speeds


def _list(given: list[str]) -> list[str]:
    """Values of a repeated option, each of which may hold several."""
    return [part for text in given for part in text.replace(",", " ").split()]


def _numbers(text: str, option: str, count: int, each: str, spread: bool = True) -> tuple[int, ...]:
    """One integer for all (with ``spread``), or ``count`` integers."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PlanError(f"{option} {text!r}: integers separated by commas are needed") from None
    if any(value < 0 for value in values):
        raise PlanError(f"{option} {text!r}: no number may be negative")
    if len(values) == 1 and spread:
        return values * count
    if len(values) != count:
        raise PlanError(f"{option} {text!r} gives {len(values)} numbers, {count} are needed (one per {each})")
    return values
