"""Orders to a running job, by its owner: common part of `recycle stop`, `recycle drain HOST` and `recycle out WORKER`.

The coordinator carries out each order, and writes an event `ordered` with its sender.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from megatron_recycle.tools.operate.ask import Unreachable, add_token_file, ask, find
from megatron_recycle.tools.operate.outlook import duration
from megatron_recycle.usage import seconds

_PAUSE = 0.5


def until(done: Callable[[], Any], limit: float) -> bool:
    """Wait until ``done``, for at most ``limit`` seconds; returns its last answer."""
    end = time.monotonic() + limit
    while not done():
        if time.monotonic() >= end:
            return False
        time.sleep(_PAUSE)
    return True


def lose(args: argparse.Namespace, what: str, workers: list[str], host: str) -> int:
    """Order these workers out, and wait until they are; returns the exit status."""
    folder, control, token = find(args)
    before = ask(control, token, "status")["workers"]
    named = ask(control, token, what, workers, host)["workers"]
    pids = [before[name]["pid"] for name in named if name in before]
    print(f"{', '.join(named)}: " + ("asked to leave after the iteration under way" if what == "leave" else
                                     "declared out"), flush=True)
    if not args.timeout:
        return 0

    def gone() -> bool:
        try:
            current = ask(control, token, "status")["workers"]
        except Unreachable:  # the job has ended meanwhile
            return True
        return not any(name in current and current[name]["pid"] in pids for name in named)

    since = time.monotonic()
    if not until(gone, args.timeout):
        print(f"still in after {duration(args.timeout)}; `recycle status {folder}` says what they do",
              file=sys.stderr)
        return 1
    print(f"gone after {duration(time.monotonic() - since)}; the others go on")
    return 0


def add_order(parser: argparse.ArgumentParser, limit: float) -> None:
    """Add the arguments that all orders have; ``limit``: seconds that a command waits until it is carried out."""
    add_token_file(parser)
    parser.add_argument("--timeout", type=seconds, default=limit, metavar="SECONDS",
                        help=f"to wait until it is done (default {limit:g}; 0: not at all)")
