"""Orders to a running job, by its owner: common part of `recycle stop`, `recycle drain HOST` and `recycle out WORKER`.

The coordinator carries out each order, and writes an event `ordered` with its sender.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from megatron_recycle.errors import ConfigError
from megatron_recycle.tools.operate.ask import Unreachable, add_run_and_token, ask, find
from megatron_recycle.tools.operate.outlook import duration

_PAUSE = 0.5


def until(done: Callable[[], Any], seconds: float) -> bool:
    """Wait until ``done``, for at most ``seconds``; returns its last answer."""
    limit = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= limit:
            return False
        time.sleep(_PAUSE)
    return True


def check_timeout(seconds: float) -> None:
    """Raises ConfigError for an impossible waiting time."""
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"--timeout is {seconds:g}; give seconds, 0 or more")


def lose(args: argparse.Namespace, what: str, workers: list[str], host: str) -> int:
    """Order these workers out, and wait until they are; returns the exit status."""
    check_timeout(args.timeout)
    address = find(args)
    before = ask(address.control, address.token, "status")["workers"]
    named = ask(address.control, address.token, what, workers, host)["workers"]
    pids = [before[name]["pid"] for name in named if name in before]
    print(f"{', '.join(named)}: " + ("asked to leave after the iteration under way" if what == "leave" else
                                     "declared out"), flush=True)
    if not args.timeout:
        return 0

    def gone() -> bool:
        try:
            current = ask(address.control, address.token, "status")["workers"]
        except Unreachable:  # the job has ended meanwhile
            return True
        return not any(name in current and current[name]["pid"] in pids for name in named)

    since = time.monotonic()
    if not until(gone, args.timeout):
        print(f"still in after {duration(args.timeout)}; `recycle status {address.folder}` says what they do",
              file=sys.stderr)
        return 1
    print(f"gone after {duration(time.monotonic() - since)}; the others go on")
    return 0


def add_order(parser: argparse.ArgumentParser, seconds: float, named: bool) -> None:
    """Add the arguments that all orders have; ``seconds``: how long a command waits until it is carried out."""
    add_run_and_token(parser, named)
    parser.add_argument("--timeout", type=float, default=seconds, metavar="SECONDS",
                        help=f"to wait until it is done (default {seconds:g}; 0: not at all)")
