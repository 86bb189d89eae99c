"""`recycle stop [RUN] [--checkpoint]`: end a running job, after a last checkpoint on request."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from megatron_recycle.errors import ConfigError
from megatron_recycle.tools.operate import orders
from megatron_recycle.tools.operate.ask import ask, find
from megatron_recycle.tools.operate.outlook import duration
from megatron_recycle.tools.operate.runs import add_run, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle stop`."""
    add_run(parser)
    orders.add_order(parser, 600.0)
    parser.add_argument("--checkpoint", action="store_true",
                        help="first save what is committed, as for a pre-emption; refused if none can be written")
    parser.add_argument("--anyway", action="store_true",
                        help="with --checkpoint: though this run has no checkpoint yet, so that it may have no folder")


def run(args: argparse.Namespace) -> int:
    """Stop the job; returns 0 once it has ended, and is saved if requested. Raises RecycleError."""
    if args.anyway and not args.checkpoint:
        raise ConfigError("--anyway is about --checkpoint: give both")
    folder, control, token = find(args)
    ask(control, token, ("save anyway" if args.anyway else "save") if args.checkpoint else "stop")
    print("the job " + ("saves what is committed, and ends" if args.checkpoint else "ends"), flush=True)
    if not args.timeout:
        return 0

    def ended() -> Any:
        return read(folder).seen.finished

    if not orders.until(ended, args.timeout):
        print(f"it has not ended after {duration(args.timeout)}: `recycle status {folder}`", file=sys.stderr)
        return 1
    message = str(ended().get("message", ""))
    print(message)
    return int(args.checkpoint and " is saved in " not in message)
