"""`recycle stop [RUN] [--checkpoint]`: end a running job, after a last checkpoint if that is asked for."""

from __future__ import annotations

import argparse

from megatron_recycle.tools.operate import orders


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle stop`."""
    orders.add_order(parser, 600.0, named=True)
    parser.add_argument("--checkpoint", action="store_true",
                        help="first save what is committed, as for a pre-emption; refused if none can be written")
    parser.add_argument("--anyway", action="store_true",
                        help="with --checkpoint: though this run has no checkpoint yet, so that it may have no folder")


def run(args: argparse.Namespace) -> int:
    """Stop the job; returns 0 once it has ended. Raises RecycleError."""
    return orders.stop(args)
