"""`recycle drain HOST`: all workers of a host leave the job at the end of an iteration, without loss, as by SIGTERM."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_recycle.errors import ConfigError
from megatron_recycle.tools.operate import orders
from megatron_recycle.tools.operate.runs import add_run_option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle drain`."""
    parser.add_argument("host", nargs="+", metavar="HOST", help="its name, as `recycle status` shows it: n3/2 or n3 or "
                        "2; the run's folder may come first")
    add_run_option(parser)
    orders.add_order(parser, 300.0)


def run(args: argparse.Namespace) -> int:
    """Drain the host; returns 0 once its workers have left. Raises RecycleError."""
    *run, host = args.host
    if len(run) + (args.run is not None) > 1:
        raise ConfigError(f"{' '.join(args.host)}: name one run and one host")
    args.run = Path(run[0]) if run else args.run
    return orders.lose(args, "leave", [], host)
