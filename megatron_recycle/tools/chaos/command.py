"""`recycle chaos`: hurts a running job on purpose. See docs/chaos.md."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatron_recycle.control import tokens
from megatron_recycle.environment import Launched
from megatron_recycle.launch.child import Child
from megatron_recycle.observe import holds
from megatron_recycle.tools.chaos.dice import KINDS, Dice
from megatron_recycle.tools.chaos.director import Director
from megatron_recycle.tools.chaos.orders import add_acts, order_of, read_file
from megatron_recycle.tools.chaos.target_job import ChaosError
from megatron_recycle.tools.operate.runs import latest
from megatron_recycle.usage import number

ALLOW = "allow"
"""In place of a script: workers listen for precise moments, and no act is planned yet."""
_PATIENCE = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `recycle chaos`."""
    parser.add_argument("--run-dir", type=Path, metavar="DIR",
                        help="the job's run directory (default: RECYCLE_RUN_DIR, or the newest under runs/)")
    acts = parser.add_subparsers(dest="act", required=True, metavar="ACT")
    add_acts(acts)
    script = acts.add_parser("script", help="the acts in a file, one a line, each at its own moment")
    script.add_argument("file", type=Path, metavar="FILE")
    dice = acts.add_parser("random", help="random acts; the same seed draws the same ones")
    dice.add_argument("--seed", type=int, default=0)
    dice.add_argument("--rate", type=_rate, default=6.0, metavar="R", help="acts in a minute (default 6)")
    dice.add_argument("--count", type=number("1 or more", lambda found: found >= 1, int), metavar="N",
                      help="how many (default: until the job ends, or Ctrl-C)")
    dice.add_argument("--last", action="store_true", help="hit the last worker of a stage too, which ends the job")
    dice.add_argument("--kinds", type=_kinds, default=None, metavar="A,B",
                      help=f"of {','.join(KINDS)} (default: all that the job's workers listen for)")
    for act in acts.choices.values():  # the option may also stand behind the act
        act.add_argument("--run-dir", type=Path, metavar="DIR", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Carry out the acts; returns 0, 1 if a moment never came, 2 if an act was refused.

    Raises:
        ChaosError: no job runs there, or the first order is refused.
        ConfigError: orders that make no sense.
    """
    run_dir = _run_dir(args.run_dir)
    orders = [] if args.act == "random" else read_file(args.file) if args.act == "script" else [order_of(args)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Director(run_dir, partial(print, file=sys.stderr, flush=True)) as director:
            return _random(director, args) if args.act == "random" else director.run(orders)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _random(director: Director, args: argparse.Namespace) -> int:
    director.await_start()
    observed = (director.job.run_dir / holds.FOLDER).is_dir()
    kinds = args.kinds or [kind for kind in KINDS if observed or kind != "stall"]
    return director.run_dice(Dice(args.seed, args.rate, kinds, observed, args.last), args.count)


def _run_dir(given: Path | None) -> Path:
    named = given or Launched.read().run_dir
    folder = (Path(named) if named else latest()).absolute()
    if not folder.is_dir():
        raise ChaosError(f"there is no run directory {folder}")
    return folder


_rate = number("more than 0 acts in a minute", lambda found: 0 < found < math.inf)


def _kinds(text: str) -> Sequence[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: give some of {','.join(KINDS)}")
    return kinds


def check_acts(chaos: str) -> None:
    """Raises ConfigError if `chaos`, of `recycle run --chaos`, is neither ALLOW nor a script."""
    if chaos != ALLOW:
        read_file(Path(chaos))


@contextmanager
def hurting(chaos: str, run_dir: Path) -> Iterator[None]:
    """Block of `recycle run --chaos` in which a process beside the job hurts it as the script says; `chaos.log` and
    `chaos.jsonl` record the acts."""
    if chaos == ALLOW:
        yield
        return
    command = [sys.executable, "-m", "megatron_recycle.cli", "chaos", "--run-dir", str(run_dir), "script", chaos]
    child = Child(command, tokens.without(os.environ), run_dir / "chaos.log")
    try:
        yield
    finally:
        child.signal(signal.SIGINT)
        if child.wait(_PATIENCE) is None:
            child.signal(signal.SIGKILL)
            child.wait(_PATIENCE)
        child.release()
