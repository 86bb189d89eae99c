"""`recycle out WORKER ...`: declare workers out at once, as one that has stalled; the others go on without them."""

from __future__ import annotations

import argparse

from megatron_recycle.errors import ConfigError
from megatron_recycle.tools.operate import orders
from megatron_recycle.tools.operate.runs import add_run_option, split


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle out`."""
    parser.add_argument("workers", nargs="+", metavar="WORKER",
                        help="by its position, 1:2; the run's folder may come first")
    add_run_option(parser)
    orders.add_order(parser, 60.0)


def run(args: argparse.Namespace) -> int:
    """Declare them out; returns 0 once they are. Raises RecycleError."""
    args.run, workers = split(args.workers, args.run)
    if not workers:
        raise ConfigError("name the workers, as 1:2; `recycle status` lists them")
    return orders.lose(args, "out", workers, "")
