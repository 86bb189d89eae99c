#!/usr/bin/env python3
"""Trains a small GPT on 6 processes, kills two of them in mid-iteration, and compares with a run without failures.

The grid is 3 pipelines (or as many as `--pipelines` says) x 2 stages with 4 micro-batches each. The victims get SIGKILL
from this process, by pid: nothing in them takes part in it. Then the same job runs in fresh processes without
failures, and parameters and optimizer state of every survivor and the loss of every iteration are compared bit for
bit.

Exit status: 0 if all of it is equal, no iteration was lost and the validation loss fell; otherwise 1.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from jobs import Event, Job, JobFailed, exit_on_sigterm
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron_recycle.errors import ConfigError

STAGES, MICROBATCHES = 2, 4
SCRIPTS = {"deepspeed": "gpt_deepspeed.py", "megatron": "pretrain_gpt_megatron.py"}
"""Backend -> the training script that runs on it."""
FOLDER = Path(__file__).resolve().parent
LEAST_ITERATIONS = 6


@dataclass
class Kill:
    """SIGKILL to `worker` once this `share` of `iteration` should be over; `t` is when it was sent."""

    worker: str
    iteration: int
    share: float
    t: float | None = None


@dataclass
class Outcome:
    """A job that has ended."""

    folder: Path
    kills: Sequence[Kill]
    events: list[Event] = field(default_factory=list)

    def of(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]

    def losses(self) -> dict[int, float]:
        """Iteration -> loss, as the coordinator recorded them."""
        return {event["iteration"]: event["loss"] for event in self.of("committed")}


# Running


def train(args: argparse.Namespace, folder: Path, kills: Sequence[Kill], console: Console) -> Outcome:
    """Run the job in `folder`, with `kills`. Raises JobFailed."""
    outcome = Outcome(folder, kills)
    state = folder / "state"
    for old in state.glob("worker-*.pt"):
        old.unlink()
    arguments = ["--iterations", str(args.iterations), "--stages", str(STAGES), "--microbatches", str(MICROBATCHES)]
    arguments += ["--dump", str(state), *(["--data", str(args.data)] if args.data else [])]
    script, settings = SCRIPTS[args.backend], {"reduction": "exact"}
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        Job(script, arguments, folder, args.pipelines * STAGES, settings, args.limit) as job,
    ):
        bar = progress.add_task(f"starting {args.pipelines * STAGES} processes", total=args.iterations)
        for event in job.events():
            outcome.events.append(event)
            if event["event"] == "committed":
                progress.update(bar, advance=1, description=f"loss {event['loss']:.3f}")
            if (line := told(event, args.iterations)) is not None:
                progress.console.print(line)
            for kill in kills:
                if kill.t is None and event["event"] == "committed" and event["iteration"] + 1 >= kill.iteration:
                    time.sleep(kill.share * iteration_time(outcome))
                    kill.t = job.kill(kill.worker)
                    who = f"worker {kill.worker} (pid {job.pids[kill.worker]})"
                    progress.console.print(f"SIGKILL to {who} in iteration {kill.iteration}", style="bold red")
        job.check_ended_well()
    return outcome


def iteration_time(outcome: Outcome) -> float:
    """Seconds of the shortest of the last iterations: while another is in the middle, this one is."""
    times = [event["t"] for event in outcome.of("committed")][-4:]
    return min((after - before for before, after in pairwise(times)), default=0.2)


def told(event: Event, iterations: int) -> str | None:
    """The line that is shown for an event, if any."""
    name = event["event"]
    if name == "started":
        return f"{len(event['members'])} workers train"
    if name == "slow":
        return f"worker {event['worker']} takes {event['factor']:.1f} times as long as its peers"
    if name == "suspected":
        return f"the coordinator knows that worker {event['worker']} is gone ({event['kind']})"
    if name == "resumed":
        return f"{event['survivors']} workers go on with iteration {event['iteration']}"
    if name == "committed" and (event["iteration"] + 1) % 10 == 0:
        return f"iteration {event['iteration'] + 1} of {iterations}, loss {event['loss']:.3f}"
    return None


# Judging


def failures(outcome: Outcome) -> list[dict[str, Any]]:
    """The outcome of each kill; times in milliseconds since the signal was sent."""
    found = []
    for kill in outcome.kills:
        of_it = (event for event in outcome.of("suspected") if event["worker"] == kill.worker)
        suspected = next((event for event in of_it if event.get("removed", True)), None)
        if suspected is None or kill.t is None:
            raise JobFailed(f"worker {kill.worker} was never found missing: the job was over before iteration "
                            f"{kill.iteration}")
        # A second failure during the recovery would have begun another generation.
        later = [event for event in outcome.of("resumed") if event["generation"] > suspected["generation"]]
        if not later:
            raise JobFailed(f"training did not go on after worker {kill.worker} was gone")
        resumed = later[0]
        planned = next(event for event in outcome.of("planned") if event["generation"] == resumed["generation"])
        found.append({
            "worker": kill.worker, "kind": suspected["kind"], "iteration": suspected["iteration"],
            "detected_ms": round((suspected["t"] - kill.t) * 1000, 1),
            "resumed_ms": round((resumed["t"] - kill.t) * 1000, 1),
            "plan_source": planned["source"], "plan_ms": planned["plan_ms"],
            "generation": resumed["generation"], "action": (suspected.get("progress") or {}).get("action"),
        })
    return found


@dataclass
class Comparison:
    """Whether groups of values are equal bit for bit, and the largest difference of any two numbers."""

    equal: dict[str, bool] = field(default_factory=dict)
    values: int = 0
    max_abs_difference: float = 0.0

    def add(self, group: str, one: Any, other: Any) -> None:
        """Compare two trees of tensors, numbers and texts."""
        import torch

        if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            for key in one:
                self.add(group, one[key], other[key])
        elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
            for first, second in zip(one, other):
                self.add(group, first, second)
        elif isinstance(one, (torch.Tensor, float)) and isinstance(other, (torch.Tensor, float)):
            kind = torch.float64 if isinstance(one, float) else None
            self._tensors(group, torch.as_tensor(one, dtype=kind), torch.as_tensor(other, dtype=kind))
        else:
            self._note(group, one == other, 0.0 if one == other else math.inf)

    def _tensors(self, group: str, one: Any, other: Any) -> None:
        import torch

        if one.dtype != other.dtype or one.shape != other.shape:
            self._note(group, False, math.inf)
            return
        self.values += one.numel()
        bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
        if torch.equal(*bits):
            self._note(group, True, 0.0)
        else:
            distance = (one.double() - other.double()).abs().max().item()
            self._note(group, False, distance if math.isfinite(distance) else math.inf)

    def _note(self, group: str, equal: bool, difference: float) -> None:
        self.equal[group] = self.equal.get(group, True) and equal
        self.max_abs_difference = max(self.max_abs_difference, difference)


def compare(outcome: Outcome, reference: Outcome, pipelines: int) -> Comparison:
    """Survivors of `outcome` against the same workers of `reference`, and the losses of both."""
    import torch

    made = Comparison()
    killed = {kill.worker for kill in outcome.kills}
    for pipeline in range(pipelines):
        for stage in range(STAGES):
            if f"{pipeline}:{stage}" in killed:
                continue
            name = f"state/worker-{pipeline}-{stage}.pt"
            one, other = (torch.load(run.folder / name, weights_only=True) for run in (outcome, reference))
            made.add("parameters", one["parameters"], other["parameters"])
            made.add("optimizer state", one["optimizer"], other["optimizer"])
            made.add("losses", one["losses"], other["losses"])
    made.add("losses", outcome.losses(), reference.losses())
    return made


def validate(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Validation losses before and after training; by the script itself, in a process of its own."""
    command = [sys.executable, "-W", "ignore", str(FOLDER / SCRIPTS[args.backend]), "--validate", str(folder)]
    done = subprocess.run([*command, *(["--data", str(args.data)] if args.data else [])],
                          stdout=subprocess.PIPE, text=True, check=True, timeout=args.limit)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: found[name] for name in ("first_validation_loss", "final_validation_loss")}


def report_of(args: argparse.Namespace, outcome: Outcome, reference: Outcome) -> dict[str, Any]:
    """The contents of report.json."""
    comparison = compare(outcome, reference, args.pipelines)
    committed = outcome.losses()
    largest = comparison.max_abs_difference
    return {
        "grid": {"pipelines": args.pipelines, "stages": STAGES, "microbatches": MICROBATCHES},
        "backend": args.backend,
        "reduction": "exact",
        "iterations": args.iterations,
        "final_loss": committed.get(args.iterations - 1),
        "final_loss_fault_free": reference.losses().get(args.iterations - 1),
        **validate(args, outcome.folder / "state"),
        "bitwise_equal": all(comparison.equal.values()),
        "equal": comparison.equal,
        "max_abs_difference": largest if math.isfinite(largest) else None,
        "values_compared": comparison.values,
        "lost_iterations": args.iterations - len(committed),
        "redone_actions": sum(event["redone"] for event in outcome.of("reconciled")),
        "failures": failures(outcome),
    }


def is_good(report: dict[str, Any]) -> bool:
    fell = report["final_validation_loss"] < report["first_validation_loss"]
    return report["bitwise_equal"] and report["lost_iterations"] == 0 and fell


# Showing


def draw(outcome: Outcome, path: Path) -> None:
    """The plan before and after the first failure, both timed with the costs that were known after it."""
    from megatron_recycle.control.plan_folder import PlanFolder
    from megatron_recycle.plan import Plan, lower_bound, replay
    from megatron_recycle.tools import timeline as pictures

    def in_use(generation: int) -> Plan:
        """The plan that this generation followed in the end."""
        of_it = [event for event in outcome.events if event.get("generation") == generation]
        digests = [event["digest"] for event in of_it if event["event"] == "planned"][:1]
        digests += [event["digest"] for event in of_it if event["event"] == "adopted"]
        kept = PlanFolder(outcome.folder / "plans").load(digests[-1])
        if kept is None:
            raise JobFailed(f"the plan {digests[-1]} of generation {generation} was not kept")
        return Plan.from_file(kept)

    first = failures(outcome)[0]
    before, after = in_use(first["generation"] - 1), in_use(first["generation"])
    # A job starts with assumed costs and plans with measured ones later: unlike units.
    problem = replace(before.problem, costs=after.problem.costs)
    timeline, bound = replay(replace(before, problem=problem)), lower_bound(problem)
    before = replace(before, problem=problem, period=timeline.period, makespan=timeline.makespan, lower_bound=bound)
    pictures.draw(path, (before, "all workers"), (after, f"after worker {first['worker']} was killed"))


def show(report: dict[str, Any], console: Console) -> None:
    """The tables."""
    table = Table("killed", "in iteration", "at", "noticed", "training again", "plan", title="failures")
    for failure in report["failures"]:
        table.add_row(failure["worker"], str(failure["iteration"]), failure["action"] or "",
                      f"{failure['detected_ms']:.0f} ms", f"{failure['resumed_ms']:.0f} ms",
                      f"{failure['plan_source']}, {failure['plan_ms']:.1f} ms")
    console.print(table)
    table = Table("", "two workers killed", "no failures", title="the same job twice")
    table.add_row("final loss", repr(report["final_loss"]), repr(report["final_loss_fault_free"]))
    for group, equal in report["equal"].items():
        table.add_row(group, "equal bit for bit" if equal else "[bold red]DIFFERENT[/]", "")
    table.add_row("largest difference", str(report["max_abs_difference"]), "")
    table.add_row("iterations lost", str(report["lost_iterations"]), "")
    table.add_row("actions that survivors lost", str(report["redone_actions"]), "")
    losses = f"{report['first_validation_loss']:.3f} -> {report['final_validation_loss']:.3f}"
    table.add_row("validation loss", losses, "")
    console.print(table)


def closing(report: dict[str, Any], folder: Path) -> str:
    """One line that says how it went."""
    if not is_good(report):
        return f"quickstart: FAILED, see {folder / 'report.json'}"
    slowest = max(failure["resumed_ms"] for failure in report["failures"])
    workers = report["grid"]["pipelines"] * STAGES
    return (f"quickstart: 2 of {workers} workers killed, training again within {slowest:.0f} ms, no iteration lost, "
            f"and the result equals the run without failures bit for bit; see {folder}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the quickstart's arguments."""
    parser.add_argument("--data", type=Path, help="a text file or a folder of them (default: the standard library)")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--pipelines", type=int, default=3, help="2 make do with 4 processes (default: 3, 6 processes)")
    parser.add_argument("--backend", choices=tuple(SCRIPTS), default="deepspeed")
    parser.add_argument("--output", type=Path, help="where everything goes (default: runs/quickstart, or "
                                                    "runs/quickstart-megatron)")
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS", help="for each of the two jobs")


def check(args: argparse.Namespace) -> None:
    """Fill in what is not given. Raises ConfigError."""
    if args.iterations < LEAST_ITERATIONS:
        raise ConfigError(f"--iterations is {args.iterations}; give {LEAST_ITERATIONS} or more")
    if args.pipelines < 2:
        raise ConfigError(f"--pipelines is {args.pipelines}; a worker of each stage is killed: give 2 or more")
    if args.data is not None:
        args.data = args.data.absolute()
        if not args.data.exists():
            raise ConfigError(f"--data: there is no {args.data}")
    if args.output is None:
        args.output = Path("runs") / ("quickstart" if args.backend == "deepspeed" else f"quickstart-{args.backend}")


def run(args: argparse.Namespace) -> int:
    """Train twice, compare, and show it; returns the exit status. Raises ConfigError for bad arguments."""
    check(args)
    exit_on_sigterm()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    begin = time.monotonic()
    kills = [Kill("1:1", args.iterations // 3, 0.5), Kill("0:0", 2 * args.iterations // 3, 0.3)]
    output = args.output.absolute()
    report_path = output / "report.json"
    report_path.unlink(missing_ok=True)
    try:
        console.rule("a job that loses two workers")
        outcome = train(args, output, kills, console)
        console.rule("the same job without failures")
        reference = train(args, output / "fault-free", (), console)
        report = report_of(args, outcome, reference)
    except JobFailed as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    report["seconds"] = round(time.monotonic() - begin, 1)
    report_path.write_text(json.dumps(report, indent=2) + "\n")
    if find_spec("matplotlib") is not None:
        draw(outcome, output / "timeline.png")
    show(report, console)
    print(closing(report, args.output), flush=True)
    return 0 if is_good(report) else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="quickstart", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    args = parser.parse_args()
    try:
        return run(args)
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
