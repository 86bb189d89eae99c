"""`recycle timeline PLAN [PLAN] [-o PICTURE]`: draw one plan file, or two of them one above the other."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_recycle.errors import ConfigError
from megatron_recycle.observe.timeline import draw, draw_pair
from megatron_recycle.plan import Plan, PlanError, check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle timeline`."""
    parser.add_argument("plan", help="plan file (JSON)")
    parser.add_argument("after", nargs="?", help="a second plan file, drawn below the first")
    parser.add_argument("-o", "--output", metavar="FILE",
                        help="picture: .png, .svg or .pdf (default: the last plan's name with .png, in this folder)")


def run(args: argparse.Namespace) -> int:
    """Draw and return 0. Raises PlanError or ConfigError, which the dispatcher tells in one line."""
    output = args.output or Path(args.after or args.plan).with_suffix(".png").name
    if args.after is None:
        draw(_legal(args.plan), output)
    else:
        draw_pair(_legal(args.plan), _legal(args.after), output, (args.plan, args.after))
    print(output)
    return 0


def _legal(path: str) -> Plan:
    """The plan of a file, checked: a picture of a plan that breaks the rules would show what cannot be."""
    if Path(path).is_dir():
        raise ConfigError(f"{path} is a folder: give a plan file; those of a job are in plans/ in its run folder")
    try:
        return check(Plan.load(path))
    except PlanError as error:
        text = str(error)
        raise PlanError(text if path in text else f"{path}: {text}") from None
