"""The `recycle` command: finds the subcommand and hands over to it.

A subcommand is a module with `add_arguments(parser)` and `run(args) -> int`. It is imported only when it is
asked for, so that `recycle run` does not wait for the planner and `recycle plan` does not load torch.
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

COMMANDS = {
    "run": ("megatron_recycle.launch.command", "start a training script so that it survives failed workers"),
    "status": ("megatron_recycle.operate.status", "how a job is, what would end it next, and what repairs it"),
    "watch": ("megatron_recycle.operate.watch", "alarms and metrics of a job, for those who look after it"),
    "logs": ("megatron_recycle.operate.logs", "the logs of all or some workers, also while they grow"),
    "report": ("megatron_recycle.operate.report", "what the failures of a job have cost, in GPU hours"),
    "stacks": ("megatron_recycle.operate.stacks", "where the threads of live workers stand"),
    "stop": ("megatron_recycle.operate.stop", "end a running job, after a last checkpoint if wanted"),
    "drain": ("megatron_recycle.operate.drain", "let all workers of a host leave a running job"),
    "out": ("megatron_recycle.operate.out", "declare workers of a running job out"),
    "serve": ("megatron_recycle.launch.serve", "serve a job's coordinator on a machine that trains nothing"),
    "plan": ("megatron_recycle.planner.command", "plan a grid with failed workers, or check a plan file"),
    "simulate": ("megatron_recycle.simulate.command", "what a job would have done through a failure trace"),
    "profile": ("megatron_recycle.observe.breakdown", "where the time of a run's iterations goes, worker by worker"),
    "timeline": ("megatron_recycle.observe.command", "draw a plan file as a picture"),
    "chaos": ("megatron_recycle.chaos.command", "hurt a running job on purpose, to see that it survives"),
    "slurm": ("megatron_recycle.launch.heal", "start hosts in place of those that a job under Slurm has lost"),
    "doctor": ("megatron_recycle.doctor", "check versions, threads, devices and determinism"),
}
"""Name of a subcommand -> (its module, one line about it)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return the exit status.

    2 is a usage error: bad arguments, settings or plan files, told in one line on standard error. 130: Ctrl-C.
    """
    open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        return _overview(arguments)
    name = arguments[0]
    module = importlib.import_module(COMMANDS[name][0])
    parser = argparse.ArgumentParser(prog=f"recycle {name}", description=COMMANDS[name][1])
    module.add_arguments(parser)
    try:
        status = int(module.run(parser.parse_args(arguments[1:])))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of the output has enough of it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the rest of it would be complained about
        return 128 + signal.SIGPIPE
    except JobEnded as error:
        print(f"recycle {name}: {error}", file=sys.stderr)
        return error.status
    except (RecycleError, PlanError) as error:
        print(f"recycle {name}: {error}", file=sys.stderr)
        return 2


def _overview(arguments: list[str]) -> int:
    """Answer `recycle`, `--help`, `--version` and unknown subcommands without importing any."""
    lines = "\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="recycle",
        description="Training that goes on when workers fail.",
        epilog=f"subcommands:\n{lines}\n\n`recycle SUBCOMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-recycle {__version__}")
    parser.add_argument("subcommand", choices=tuple(COMMANDS), metavar="SUBCOMMAND")
    if not arguments:
        parser.print_help()
        return 2
    parser.parse_args(arguments[:1])  # exits: help, version, or an unknown subcommand
    raise AssertionError("unreachable: known subcommands are handled in main()")


if __name__ == "__main__":
    sys.exit(main())
