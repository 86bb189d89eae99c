"""The way from a command line to the coordinator of a run, for orders: who gives them has the owner's token."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from megatron_recycle.errors import ConfigError
from megatron_recycle.launch import meeting
from megatron_recycle.tools.operate.ask import secret
from megatron_recycle.tools.operate.runs import add_run, folder_of


@dataclass(frozen=True)
class Door:
    """Where the coordinator of the run in ``folder`` listens, and the job's token."""

    folder: Path
    control: str
    token: str


def add_door(parser: argparse.ArgumentParser, named: bool = True) -> None:
    """Add the arguments that name a run and its token; the run as an option, unless it is ``named`` first."""
    if named:
        add_run(parser)
    else:
        parser.add_argument("--run", type=Path, metavar="RUN",
                            help="folder of the run (default: RECYCLE_RUN_DIR, or the latest in runs/)")
    parser.add_argument("--token-file", type=Path, metavar="FILE",
                        help="where the job's token stands (default: RECYCLE_TOKEN, or the run's folder)")


def find(args: argparse.Namespace) -> Door:
    """The door of the run that is named. Raises ConfigError."""
    folder = folder_of(args.run)
    home = folder if (folder / meeting.FILE).exists() else folder.parent  # one of several coordinators: node-K
    found = meeting.read(home)
    if found is None or not found.control:
        raise ConfigError(f"no job runs in {folder} (it has no {meeting.FILE}): `recycle status {folder}` says how it "
                          "ended")
    return Door(folder, found.control, secret(found, os.environ, args.token_file))
