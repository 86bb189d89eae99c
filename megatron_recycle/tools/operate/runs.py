"""Folder of a run, from its name on a command line, and the content of its files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_recycle.config import variable
from megatron_recycle.errors import ConfigError
from megatron_recycle.launch import devices, meeting
from megatron_recycle.launch.meeting import Meeting
from megatron_recycle.membership.records import restore
from megatron_recycle.observe.events import read_events
from megatron_recycle.tools.operate.job_history import JobHistory
from megatron_recycle.tools.operate.outlook import Facts

EVENTS, JOURNAL = "events.jsonl", "journal.jsonl"
_RUN = "folder of the run (default: RECYCLE_RUN_DIR, or the latest in runs/)"
_WORKER = re.compile(r"\d+:\d+(\.\d+)?\Z")
_WORTHLESS = ('"event": "rolled_back"', '"event": "rebuilt"', '"event": "hint"')


def add_run(parser: Any) -> None:
    """Add the argument that names a run."""
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help=_RUN)


def add_run_option(parser: Any) -> None:
    """Add the option that names a run."""
    parser.add_argument("--run", type=Path, metavar="RUN", help=_RUN)


def add_names(parser: Any) -> None:
    """Add the arguments that name a run and some of its workers; `split` reads them."""
    parser.add_argument("names", nargs="*", metavar="[RUN] [WORKER ...]",
                        help=f"{_RUN}, and positions, 1:2 (default: all workers)")
    add_run_option(parser)


def split(names: list[str], run: Path | None) -> tuple[Path | None, list[str]]:
    """The run's folder and the workers among ``names``. Raises ConfigError."""
    folders = [name for name in names if not _WORKER.match(name)]
    if len(folders) + (run is not None) > 1:
        raise ConfigError(f"{', '.join(folders)}: name one run, and workers as 1:2")
    return (Path(folders[0]) if folders else run), [name for name in names if _WORKER.match(name)]


def meeting_of(folder: Path) -> Meeting | None:
    """Address of the coordinator of the run in ``folder``. Raises ConfigError."""
    home = folder if (folder / meeting.FILE).exists() else folder.parent  # one of several coordinators: node-K
    return meeting.read(home)


def latest() -> Path:
    """The folder in runs/ whose events are the latest. Raises ConfigError if there is none."""
    found = sorted(Path("runs").glob(f"*/{EVENTS}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError("there is no run in runs/: name the folder of one, as its launcher has printed it "
                          "(\"logs and events in ...\")")
    return found[-1].parent


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A block that reads a run's events and their fields. Raises ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} was written by another version of megatron-recycle (it lacks {error}): use the "
                          "version that runs the job") from error


def folder_of(given: Path | None) -> Path:
    """The folder of a run: the named one, or RECYCLE_RUN_DIR's, or the last written one in runs/.

    Raises:
        ConfigError: there is none, or it is no run's.
    """
    if given is None and (named := os.environ.get(variable("run_dir"))):
        given = Path(named)
    if given is None:
        given = latest()
    folder = given.parent if given.name == EVENTS else given
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: name the folder of a run, as its launcher has printed it "
                          "(\"logs and events in ...\")")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"{folder} cannot be read: it is for the user alone who has started the job (uid "
                          f"{folder.stat().st_uid}): ask as that user")
    nodes = sorted(folder.glob(f"node-*/{EVENTS}"))
    if not (folder / EVENTS).exists() and nodes:  # a coordinator on each host
        return max(nodes, key=lambda path: path.stat().st_mtime).parent
    if not any((folder / name).exists() for name in (EVENTS, JOURNAL, meeting.FILE, "coordinator.log")):
        raise ConfigError(f"{folder} is no run's: it has neither {EVENTS} nor {JOURNAL}; name the folder that the "
                          "job's launcher has printed")
    return folder


def read(folder: Path) -> Facts:
    """All facts in the files of ``folder``; unreadable files are skipped. Raises ConfigError if no file can be read."""
    problems: list[str] = []
    events: list[dict[str, Any]] = []
    try:
        events = [event for event in read_events(folder / EVENTS, skip=_WORTHLESS)
                  if isinstance(event.get("event"), str)]
    except (OSError, ValueError) as error:
        problems.append(f"events cannot be read: {error}")
    with reading(folder / EVENTS):
        seen = JobHistory(events)
    state = None
    try:
        if (folder / JOURNAL).exists():
            state = restore(seen.size, read_events(folder / JOURNAL))
    except (OSError, KeyError, TypeError, ValueError) as error:
        problems.append(f"the journal cannot be read: {error}")
    found = None
    try:
        found = meeting_of(folder)
    except (ConfigError, OSError) as error:
        problems.append(str(error))
    if not events and state is None and found is None:
        raise ConfigError(f"{folder}: {'; '.join(problems) or 'nothing has happened yet'}")
    return Facts(seen, time.time(), str(folder), state, meeting=found, gpus=devices.read(folder),
                 problems=tuple(problems))
