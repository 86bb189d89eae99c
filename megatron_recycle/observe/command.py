"""`recycle timeline PLAN [PLAN] -o PICTURE`: draw one plan file, or two of them one above the other."""

from __future__ import annotations

import argparse

from megatron_recycle.observe.timeline import draw, draw_pair
from megatron_recycle.plan import Plan, PlanError, check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle timeline`."""
    parser.add_argument("plan", help="plan file (JSON)")
    parser.add_argument("after", nargs="?", help="a second plan file, drawn below the first")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="picture: .png, .svg or .pdf")


def run(args: argparse.Namespace) -> int:
    """Draw and return 0. Raises PlanError or ConfigError, which the dispatcher tells in one line."""
    if args.after is None:
        draw(_legal(args.plan), args.output)
    else:
        draw_pair(_legal(args.plan), _legal(args.after), args.output, (args.plan, args.after))
    print(args.output)
    return 0


def _legal(path: str) -> Plan:
    """The plan of a file: a picture of one that breaks the rules would show what cannot be."""
    try:
        return check(Plan.load(path))
    except PlanError as error:
        text = str(error)
        raise PlanError(text if path in text else f"{path}: {text}") from None
