"""`recycle stacks [RUN] [WORKER ...]`: stacks of all threads of live workers, each asked through the coordinator."""

from __future__ import annotations

import argparse

from megatron_recycle.membership.names import in_order
from megatron_recycle.observe.text import printable
from megatron_recycle.tools.operate.ask import add_token_file, ask_stacks, find
from megatron_recycle.tools.operate.runs import add_names, split
from megatron_recycle.usage import some_seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle stacks`."""
    add_names(parser)
    add_token_file(parser)
    parser.add_argument("--host", default="", help="the workers of this host only")
    parser.add_argument("--timeout", type=some_seconds, default=5.0, metavar="SECONDS", help="to wait (default 5)")


def run(args: argparse.Namespace) -> int:
    """Print the stacks; returns 1 if some worker has not answered. Raises RecycleError."""
    args.run, workers = split(args.names, args.run)
    _, control, token = find(args)
    found = ask_stacks(control, token, workers, args.host, args.timeout)
    silent = [name for name in in_order(found) if found[name] is None]
    for name in in_order(found):
        if (text := found[name]) is not None:
            print(f"== {name}\n{printable(text).rstrip()}\n")
    if silent:
        print(f"{', '.join(silent)} said nothing in {args.timeout:g} s: frozen, or in a library that holds Python's "
              "lock; on its host `py-spy dump --pid PID` reads it from outside (`recycle status` has host and pid)")
    return int(bool(silent))
