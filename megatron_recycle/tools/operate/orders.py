"""`recycle stop`, `recycle drain HOST`, `recycle out WORKER`: orders to a running job, by its owner.

Each is carried out by the coordinator, and is an event `ordered` that says who has given it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection
from typing import Any

from megatron_recycle.errors import ConfigError
from megatron_recycle.tools.operate.ask import Door, Unreachable, add_door, ask, find
from megatron_recycle.tools.operate.outlook import duration
from megatron_recycle.tools.operate.runs import read

_PAUSE = 0.5


def until(done: Callable[[], Any], seconds: float) -> bool:
    """Wait for that long, at most, until ``done`` says so."""
    limit = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= limit:
            return False
        time.sleep(_PAUSE)
    return True


def members(door: Door) -> dict[str, Any]:
    """The workers that are in, with what the coordinator says of each. Raises Unreachable."""
    found: dict[str, Any] = ask(door.control, door.token, "status")["workers"]
    return found


def wait_gone(door: Door, names: Collection[str], pids: Collection[int], seconds: float) -> bool:
    """Whether none of these processes is a member any more, within so many seconds."""
    def gone() -> bool:
        try:
            there = members(door)
        except Unreachable:  # the job has ended meanwhile
            return True
        return not any(name in there and there[name]["pid"] in pids for name in names)

    return until(gone, seconds)


def check_timeout(seconds: float) -> None:
    """Raises ConfigError for a time that nobody can wait."""
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"--timeout is {seconds:g}; give seconds, 0 or more")


def lose(args: argparse.Namespace, what: str, workers: list[str], host: str) -> int:
    """Order that these go, and wait until they have; returns the exit status."""
    check_timeout(args.timeout)
    door = find(args)
    before = members(door)
    named = ask(door.control, door.token, what, workers, host)["workers"]
    pids = [before[name]["pid"] for name in named if name in before]
    print(f"{', '.join(named)}: " + ("asked to leave after the iteration under way" if what == "leave" else
                                     "declared out"), flush=True)
    since = time.monotonic()
    if not args.timeout:
        return 0
    if not wait_gone(door, named, pids, args.timeout):
        print(f"still in after {duration(args.timeout)}; `recycle status {door.folder}` says what they do",
              file=sys.stderr)
        return 1
    print(f"gone after {duration(time.monotonic() - since)}; the others go on")
    return 0


def stop(args: argparse.Namespace) -> int:
    """Order the end of the job, and wait for it; returns the exit status."""
    check_timeout(args.timeout)
    if args.anyway and not args.checkpoint:
        raise ConfigError("--anyway is about --checkpoint: give both")
    door = find(args)
    ask(door.control, door.token, ("save anyway" if args.anyway else "save") if args.checkpoint else "stop")
    print("the job " + ("saves what is committed, and ends" if args.checkpoint else "ends"), flush=True)
    if not args.timeout:
        return 0

    def ended() -> Any:
        return read(door.folder).seen.finished

    if not until(ended, args.timeout):
        print(f"it has not ended after {duration(args.timeout)}: `recycle status {door.folder}`", file=sys.stderr)
        return 1
    message = str(ended().get("message", ""))
    print(message)
    return int(args.checkpoint and " is saved in " not in message)


def add_timeout(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Add how long a command waits until its order is carried out."""
    parser.add_argument("--timeout", type=float, default=seconds, metavar="SECONDS",
                        help=f"to wait until it is done (default {seconds:g}; 0: not at all)")


def add_order(parser: argparse.ArgumentParser, seconds: float, named: bool) -> None:
    """Add the arguments that all orders have."""
    add_door(parser, named)
    add_timeout(parser, seconds)
