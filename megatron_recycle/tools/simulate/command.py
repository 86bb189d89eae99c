"""``recycle simulate``: a job through a failure trace, by several policies."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from megatron_recycle.plan import Costs, PlanError
from megatron_recycle.tools.simulate import model_costs
from megatron_recycle.tools.simulate.cluster import Cluster
from megatron_recycle.tools.simulate.compare import ORDER, USUAL, compare, makers
from megatron_recycle.tools.simulate.generating import Failures, generate
from megatron_recycle.tools.simulate.job import Job, profiled
from megatron_recycle.tools.simulate.policies.recycling import Stalls
from megatron_recycle.tools.simulate.reading import read
from megatron_recycle.tools.simulate.report import show
from megatron_recycle.tools.simulate.trace import Trace, TraceError
from megatron_recycle.usage import seconds, some_seconds

_STALLS = {
    "start": "until a process has built its model (default 30)", "save": "that a checkpoint takes (default 30)",
    "restart": "of a whole job (default 300)", "save_every": "between checkpoints (default 3600)",
    "wait": "that a job of ours waits for its whole grid, before it begins on what is there (default: until that comes;"
            " 3600 if it never does)",
}
"""Fields of `Stalls` that are options -> their help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``recycle simulate``."""
    what = parser.add_argument_group("the trace: a file, or made up")
    what.add_argument("--trace", metavar="FILE", help="'time_ms,add|remove,node', 'date, time, count' or JSON lines; a"
                                                      " name alone is looked for in $RECYCLE_TRACES, too")
    what.add_argument("--longest-gap", type=float, metavar="SECONDS",
                      help="cut longer gaps out of a trace that counts machines (default: the last count holds)")
    what.add_argument("--gpu-mtbf", type=float, metavar="HOURS", help="mean time between failures of one GPU")
    what.add_argument("--host-mtbf", type=float, metavar="HOURS", help="of one host")
    what.add_argument("--rack-mtbf", type=float, metavar="HOURS", help="of one rack")
    what.add_argument("--rack", type=int, default=16, metavar="HOSTS", help="of a rack (default 16)")
    what.add_argument("--shape", type=float, default=1.0, metavar="K",
                      help="of the Weibull distribution of times between failures (default 1: exponential)")
    what.add_argument("--repair", type=float, default=4.0, metavar="HOURS", help="mean time to repair (default 4)")
    what.add_argument("--hours", type=float, metavar="H", help="that are simulated (default: the trace's, or 24)")
    what.add_argument("--seed", type=int, default=0)
    what.add_argument("--seeds", type=int, default=1, metavar="N",
                      help="so many made-up traces, for confidence intervals")
    what.add_argument("--write-trace", metavar="FILE", help="write the (first) trace as JSON lines")
    job = parser.add_argument_group("the job and its cluster")
    job.add_argument("--grid", required=True, metavar="DxSxM", help="pipelines x stages x micro-batches of a pipeline")
    job.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs of a worker (tensor parallelism)")
    job.add_argument("--gpus", type=int, default=8, metavar="N", help="of a host (default 8)")
    job.add_argument("--hosts", type=int, metavar="N", help="default: what the grid needs; more are spares")
    job.add_argument("--costs", metavar="F,B,W", help="milliseconds of a stage, one triple or one per stage, with ';'")
    job.add_argument("--profile", metavar="EVENTS", help="events.jsonl of a real run, for its measured costs")
    job.add_argument("--model", metavar="NAME", help=f"{', '.join(model_costs.MODELS)}, or LAYERS,HIDDEN[,SEQUENCE"
                                                     "[,BATCH[,WORDS]]]")
    job.add_argument("--tflops", type=float, default=140.0, help="that a GPU reaches, for --model (default 140)")
    job.add_argument("--network", type=float, default=20.0, metavar="GB/S", help="per GPU, for --model (default 20)")
    job.add_argument("--step-cost", type=float, metavar="MS", help="of a stage's reduce-and-step, for --costs")
    job.add_argument("--hop-cost", type=float, metavar="MS", help="of a transfer, for --costs")
    job.add_argument("--copy", type=float, metavar="SECONDS", help="to copy a worker's state from a peer")
    job.add_argument("--cap", type=int, metavar="N",
                     help="activations that a worker may hold (default: twice the stages)")
    how = parser.add_argument_group("the policies")
    how.add_argument("--policy", nargs="+", default=[*USUAL], metavar="NAME", help=f"all, or of {', '.join(ORDER)}")
    how.add_argument("--recovery", metavar="FILE", help="stalls as measured by scripts/bench/recovery.py (its JSON)")
    for name, text in _STALLS.items():
        how.add_argument(f"--{name.replace('_', '-')}", type=some_seconds if name == "save_every" else seconds,
                         metavar="SECONDS", help=text)
    how.add_argument("--technique", choices=("adaptive", "decoupled", "staggered"), default="staggered")
    how.add_argument("--shapes", choices=("auto", "exact", "multiset"), default="auto",
                     help="whether losses in another order of stages need another plan (auto: on small grids)")
    how.add_argument("--quick", action="store_true",
                     help="plans as they are there at once, without a job's search for better ones on small grids")
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="write everything there; - for standard output, without the table")
    out.add_argument("--picture", metavar="FILE", help="throughput over time, .png or .svg")


def run(args: argparse.Namespace) -> int:
    """Simulate; returns 0. Raises TraceError and PlanError, whose messages name the fault."""
    pipelines, stages, microbatches = _grid(args.grid)
    job = _job(args, pipelines, stages, microbatches)
    needed = -(-pipelines * stages * args.tp // max(1, args.gpus))
    cluster = Cluster(needed if args.hosts is None else args.hosts, args.gpus, args.tp)
    wanted = makers(ORDER if args.policy == ["all"] else args.policy, _stalls(args))
    traces = _traces(args, cluster)
    if args.write_trace:
        _write(args.write_trace, "\n".join(traces[0].lines()))
    console = Console(stderr=args.json == "-", width=None if sys.stdout.isatty() else 180)
    with _shown(len(wanted) * len(traces)) as progress:
        rows, notes = compare(wanted, job, cluster, traces, technique=args.technique, shapes=args.shapes,
                              work=0 if args.quick else None, progress=progress)
    hours = traces[0].duration / 3600
    if not any(trace.outages for trace in traces):
        notes += (_quiet(args, hours),)
    for note in notes:
        print(f"recycle simulate: {note}", file=sys.stderr)
    setup = {"grid": [pipelines, stages, microbatches], "tp": args.tp, "hosts": cluster.hosts, "gpus": cluster.gpus,
             "costs": job.costs.to_json(), "unit_seconds": job.unit, "cap": job.activations, "trace": args.trace,
             "hours": hours, "outages": [trace.failures for trace in traces], "notes": notes,
             "technique": args.technique}
    told = json.dumps({"about": setup, "policies": [row.to_json() for row in rows]})
    if args.json == "-":
        print(told)
    else:
        outages = sum(trace.failures for trace in traces) / len(traces)
        show(rows, console, f"{args.grid}, TP {args.tp}, {cluster.hosts} hosts with {cluster.gpus} GPUs; {hours:.1f} h;"
                            f" {outages:.0f} outages in the trace; fault-free: stock 1F1B")
    if args.json and args.json != "-":
        _write(args.json, told)
    if args.picture:
        from megatron_recycle.tools.simulate.charts import over_time

        over_time(rows, Path(args.picture))
    return 0


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror}") from error


def _grid(text: str) -> tuple[int, int, int]:
    try:
        pipelines, stages, microbatches = (int(part) for part in text.split("x"))
    except ValueError:
        raise PlanError(f"--grid {text!r} is not PIPELINESxSTAGESxMICROBATCHES, for example 16x12x32") from None
    if min(pipelines, stages, microbatches) < 1:
        raise PlanError(f"--grid {text}: all three must be at least 1")
    return pipelines, stages, microbatches


def _job(args: argparse.Namespace, pipelines: int, stages: int, microbatches: int) -> Job:
    given = [name for name in ("costs", "profile", "model") if getattr(args, name)]
    if len(given) > 1:
        raise PlanError(f"give one of --{' and --'.join(given)}")
    copy, layers = 0.0, 4
    if args.profile:
        costs = profiled(args.profile)
    elif args.model:
        model = _model(args.model)
        machine = model_costs.Machine(tflops=args.tflops, net_gbps=args.network)
        costs, copy = model_costs.costs(model, machine, pipelines, stages, args.tp)
        layers = max(1, model.layers // stages)
    else:
        costs = _typed(args, stages)
    return Job(pipelines, stages, microbatches, costs, cap=args.cap, layers=layers,
               state_seconds=copy if args.copy is None else args.copy)


def _typed(args: argparse.Namespace, stages: int) -> Costs:
    rows = [part.split(",") for part in (args.costs or "20,22,18").split(";")]
    try:
        triples = [tuple(round(1000 * float(value)) for value in row) for row in rows]
        if len(triples) not in (1, stages) or any(len(triple) != 3 for triple in triples):
            raise ValueError
    except ValueError:
        raise PlanError(f"--costs {args.costs!r} is not F,B,W, nor {stages} such triples separated by ;") from None
    forward, backward, weight = zip(*(triples * stages if len(triples) == 1 else triples))
    return Costs(forward, backward, weight, round(1000 * (args.hop_cost or 0)),
                 (round(1000 * (args.step_cost or 0)),) * stages)


def _model(text: str) -> model_costs.Model:
    if text in model_costs.MODELS:
        return model_costs.MODELS[text]
    sizes = text.split(",")
    if not 2 <= len(sizes) <= 5 or not all(size.strip().isdecimal() for size in sizes):
        raise PlanError(f"--model {text!r}: give {', '.join(model_costs.MODELS)}, or LAYERS,HIDDEN")
    return model_costs.Model(*map(int, sizes))


def _stalls(args: argparse.Namespace) -> Stalls:
    stalls = Stalls.measured(args.recovery) if args.recovery else Stalls()
    given = {name: getattr(args, name) for name in _STALLS if getattr(args, name) is not None}
    return replace(stalls, **given)


def _quiet(args: argparse.Namespace, hours: float) -> str:
    """Reason for a trace without failures."""
    if args.trace:
        return f"nothing fails in {args.trace}"
    given = [f"--{name.replace('_', '-')} {getattr(args, name):g}" for name in ("gpu_mtbf", "host_mtbf", "rack_mtbf")
             if getattr(args, name)]
    if not given:
        return "nothing fails: give --trace, or --gpu-mtbf, --host-mtbf or --rack-mtbf"
    return (f"with {' and '.join(given)} nothing has failed in {hours:g} hours: give more --hours, another --seed or "
            "more --seeds, or a shorter mean time between failures")


def _traces(args: argparse.Namespace, cluster: Cluster) -> list[Trace]:
    rates = {name: getattr(args, f"{name}_mtbf") for name in ("gpu", "host", "rack")}
    made_up = [name for name, hours in rates.items() if hours is not None]
    if args.trace and made_up:
        raise TraceError(f"give --trace or --{made_up[0]}-mtbf, not both")
    if args.trace:
        trace = read(_found(args.trace), seed=args.seed, longest_gap=args.longest_gap)
        return [trace if args.hours is None else trace.part(0.0, 3600 * args.hours)]
    if args.seeds < 1:
        raise TraceError("--seeds must be at least 1")
    failures = {f"of_{name}s": None if hours is None else Failures(3600 * hours, args.shape, 3600 * args.repair)
                for name, hours in rates.items()}
    duration = 3600 * (24.0 if args.hours is None else args.hours)
    return [generate(cluster.hosts, cluster.gpus, duration, args.seed + number, rack=args.rack, **failures)
            for number in range(args.seeds)]


def _found(name: str) -> Path:
    """The file, or a trace of that name on this machine."""
    path, folder = Path(name), os.environ.get("RECYCLE_TRACES")
    return Path(folder) / name if not path.exists() and folder and (Path(folder) / name).exists() else path


@contextmanager
def _shown(total: int) -> Iterator[Callable[[str, int, float], None]]:
    """A progress bar on standard error, if that is a terminal."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("", total=float(total))
        done: dict[tuple[str, int], float] = {}

        def progress(name: str, number: int, share: float) -> None:
            done[name, number] = share
            bar.update(task, completed=sum(done.values()), description=f"{name}, trace {number + 1}")

        yield progress
