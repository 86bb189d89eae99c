"""The `recycle` command: finds the subcommand and hands over to it.

A subcommand is a module with `add_arguments(parser)` and `run(args) -> int`. It is imported on use only, so that
`recycle run` does not wait for the planner and `recycle plan` does not load torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from megatron_recycle import __version__
from megatron_recycle.errors import JobEnded, RecycleError
from megatron_recycle.plan.plan import PlanError
from megatron_recycle.streams import open_standard_streams
from megatron_recycle.usage import USAGE_ERROR, Parser, hint

COMMANDS = {
    "run": ("megatron_recycle.launch.command", "start a training script so that it survives failed workers"),
    "status": ("megatron_recycle.tools.operate.status", "how a job is, what would end it next, and what repairs it"),
    "watch": ("megatron_recycle.tools.operate.watch", "alarms, metrics and a page of a job"),
    "logs": ("megatron_recycle.tools.operate.logs", "the logs of all or some workers, also while they grow"),
    "runbook": ("megatron_recycle.tools.runbook", "what to do about a warning, or the end of a job"),
    "report": ("megatron_recycle.tools.operate.report", "what the failures of a job have cost, in GPU hours"),
    "stacks": ("megatron_recycle.tools.operate.stacks", "where the threads of live workers stand"),
    "stop": ("megatron_recycle.tools.operate.stop", "end a running job, after a last checkpoint if wanted"),
    "drain": ("megatron_recycle.tools.operate.drain", "let all workers of a host leave a running job"),
    "out": ("megatron_recycle.tools.operate.out", "declare workers of a running job out"),
    "serve": ("megatron_recycle.launch.serve", "serve a job's coordinator on a machine that trains nothing"),
    "quickstart": ("megatron_recycle.tools.quickstart", "see a small job lose two workers and end with the same bits"),
    "example": ("megatron_recycle.tools.examples", "write an example training script into a folder"),
    "plan": ("megatron_recycle.planner.command", "plan a grid with failed workers, or check a plan file"),
    "simulate": ("megatron_recycle.tools.simulate.command", "what a job would have done through a failure trace"),
    "profile": ("megatron_recycle.tools.profile", "where the time of a run's iterations goes, worker by worker"),
    "timeline": ("megatron_recycle.tools.timeline", "draw a plan file, or an iteration of a job beside its plan"),
    "chaos": ("megatron_recycle.tools.chaos.command", "hurt a running job on purpose, to see that it survives"),
    "slurm": ("megatron_recycle.tools.heal", "print a batch script; start hosts in place of lost ones"),
    "doctor": ("megatron_recycle.tools.doctor", "check versions, threads, devices and determinism"),
}
"""Name of a subcommand -> (its module, a one-line summary)."""

EXAMPLES = {
    "run": "recycle run --nproc 4 --set reduction=exact train.py --your-arguments",
    "status": "recycle status runs/slurm-4711 --watch",
    "watch": "recycle watch runs/slurm-4711 --on-event ./page-me.sh",
    "logs": "recycle logs 1:2 --run runs/slurm-4711 --since 10m -f",
    "runbook": "recycle runbook last-copy",
    "report": "recycle report runs/slurm-4711 > report.md",
    "stacks": "recycle stacks 1:2 --run runs/slurm-4711",
    "stop": "recycle stop runs/slurm-4711 --checkpoint",
    "drain": "recycle drain node17 --run runs/slurm-4711",
    "out": "recycle out 1:2 --run runs/slurm-4711",
    "serve": "recycle serve --workers 32 --interface 10.0.0.5 --port 29500 --token-file token",
    "quickstart": "recycle quickstart --pipelines 2 --iterations 12",
    "example": "recycle example deepspeed my-job",
    "plan": "recycle plan --pipelines 3 --stages 4 --microbatches 6 --failed 1:2",
    "simulate": "recycle simulate --grid 3x4x6 --gpus 4 --gpu-mtbf 100 --hours 24 --model gpt3-6.7b",
    "profile": "recycle profile runs/slurm-4711",
    "timeline": "recycle timeline plan.json -o plan.svg",
    "chaos": "recycle chaos --run-dir runs/slurm-4711 kill 1:1 --at-iteration 20",
    "slurm": "recycle slurm script deepspeed > job.sbatch",
    "doctor": "recycle doctor --stages 4 --nproc 8 --nnodes 2",
}
"""Name of a subcommand -> an example command line for its help."""

STATUSES = {
    "0": "done; of a job: training came to its end, whoever died on the way",
    "1": "a job that could not go on, or a check that failed; the last line says why",
    "2": "refused: an argument, a setting or a file; one line says why",
    "3": "of a worker's process alone: it was declared out, and woke up later; of `recycle status`: see there",
    "129, 130, 143": "ended by SIGHUP, Ctrl-C, SIGTERM",
    "141": "the reader of the output went away",
}
"""Exit statuses of all subcommands, and of workers."""

_INSTALLS = {"rich": "rich", "matplotlib": "matplotlib", "torch": "torch", "numpy": "numpy", "packaging": "packaging",
             "prometheus_client": "prometheus-client", "aiohttp": "aiohttp",
             "deepspeed": "'deepspeed>=0.19.8,<0.20'", "megatron": "'megatron-core>=0.16,<0.20'"}
"""A package that a command imports -> its pip requirement."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return the exit status; see `STATUSES`."""
    open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    if not arguments or arguments[0] not in COMMANDS:
        return _overview(arguments)
    name = arguments[0]
    parser = Parser(prog=f"recycle {name}", description=COMMANDS[name][1],
                    epilog=f"example: {EXAMPLES[name]}" if name in EXAMPLES else None)
    try:
        module = importlib.import_module(COMMANDS[name][0])
        module.add_arguments(parser)
        status = int(module.run(parser.parse_args(arguments[1:])))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain about the rest of it
        return 128 + signal.SIGPIPE
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _INSTALLS:
            raise
        print(f"recycle {name}: it needs {package}, which is not installed: pip install {_INSTALLS[package]}",
              file=sys.stderr)
        return USAGE_ERROR
    except JobEnded as error:
        print(f"recycle {name}: {error}", file=sys.stderr)
        return error.status
    except (RecycleError, PlanError) as error:
        print(f"recycle {name}: {error}", file=sys.stderr)
        return parser.status


def _overview(arguments: list[str]) -> int:
    """Answer `recycle`, `--help`, `--version` and unknown subcommands without importing any."""
    lines = "\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())
    ends = "\n".join(f"  {status:<13} {text}" for status, text in STATUSES.items())
    parser = Parser(
        prog="recycle",
        description="Training that goes on when workers fail.",
        epilog=f"subcommands:\n{lines}\n\nexit status:\n{ends}\n\n`recycle help SUBCOMMAND` has its arguments.\n"
        "example: recycle run --nproc 4 train.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-recycle {__version__}")
    parser.add_argument("subcommand", metavar="SUBCOMMAND", nargs="?")
    if not arguments:
        parser.print_help()
        return USAGE_ERROR
    name = parser.parse_args(arguments[:1]).subcommand  # exits: help, version
    print(f"recycle: there is no subcommand {name}{hint(name, list(COMMANDS))}; `recycle help` lists all",
          file=sys.stderr)
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
