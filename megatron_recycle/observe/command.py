"""`recycle timeline PLAN [PLAN] -o PICTURE`: draw one plan file, or two of them one above the other."""

from __future__ import annotations

import argparse

from megatron_recycle.observe.timeline import draw, draw_pair
from megatron_recycle.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle timeline`."""
    parser.add_argument("plan", help="plan file (JSON)")
    parser.add_argument("after", nargs="?", help="a second plan file, drawn below the first")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="picture: .png, .svg or .pdf")


def run(args: argparse.Namespace) -> int:
    """Draw and return 0. Raises PlanError or ConfigError, which the dispatcher tells in one line."""
    if args.after is None:
        draw(Plan.load(args.plan), args.output)
    else:
        draw_pair(Plan.load(args.plan), Plan.load(args.after), args.output, (args.plan, args.after))
    print(args.output)
    return 0
