"""Folder of a run: events.jsonl, journal.jsonl, a log per worker, the plans.

It is this user's alone (0700): a file in it can end a job or lead the job's files elsewhere.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

from megatron_recycle.control import Journal, JournalError, JournalInUse
from megatron_recycle.errors import ConfigError
from megatron_recycle.observe.stacks import FOLDER

_OURS = ("journal.jsonl", "events.jsonl", "coordinator.log", "worker-*.log", "plans", "chaos.jsonl", "chaos.log",
         "chaos", "join.json", "join.part", "join.token", "page.token", "timings",
         "devices", "watch.log", "ticks-*.jsonl", FOLDER)
_OTHERS = "choose another --run-dir"


def make(run_dir: Path) -> None:
    """Make the folder, for this user alone, if it is not there.

    Raises:
        ConfigError: it cannot be made or written to, belongs to another user, or others can write to it.
    """
    try:
        for parent in reversed(run_dir.absolute().parents):
            if not parent.is_dir():
                parent.mkdir(mode=0o755, exist_ok=True)
        run_dir.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the run's folder {run_dir} cannot be made ({error.strerror}): {_OTHERS}") from error
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise ConfigError(f"the run's folder {run_dir} cannot be written to: {_OTHERS}")
    found = run_dir.stat()
    if not {found.st_uid, run_dir.lstat().st_uid} <= {os.geteuid(), _owner_of_new_files(run_dir, found.st_uid)}:
        raise ConfigError(f"the run's folder {run_dir} belongs to another user (uid {found.st_uid}, this is "
                          f"{os.geteuid()}): {_OTHERS}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"others can write to the run's folder {run_dir}: `chmod go-w {run_dir}`, or {_OTHERS}")


def prepare(run_dir: Path) -> None:
    """Make the folder; files of an earlier run in it move to a folder `before-<time>` inside. Links move as links.

    Raises:
        ConfigError: a job is running there, or see `make`.
    """
    make(run_dir)
    journal = run_dir / "journal.jsonl"
    if journal.is_file() and not journal.is_symlink():
        try:
            Journal.reopen(journal).close()
        except JournalInUse as error:
            raise ConfigError(f"a job is running in {run_dir}: {_OTHERS}") from error
        except JournalError:
            pass  # damaged, but no running job's
    old = sorted(path for path in run_dir.iterdir() if any(fnmatch(path.name, pattern) for pattern in _OURS))
    if not old:
        return
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(max(path.lstat().st_mtime for path in old)))
    aside = _new_folder(run_dir / f"before-{stamp}")
    for path in old:
        path.replace(aside / path.name)


def _new_folder(wanted: Path) -> Path:
    """Make a new folder, called `wanted` or, if that name is taken, with a number behind it."""
    name, number = wanted, 1
    while True:
        try:
            name.mkdir(mode=0o700)
            return name
        except FileExistsError:
            number += 1
            name = wanted.with_name(f"{wanted.name}-{number}")


def _owner_of_new_files(folder: Path, owner: int) -> int:
    """Owner of a file that this process makes in `folder`: some file systems map users."""
    if owner == os.geteuid():
        return owner
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".owner-") as file:
            return os.fstat(file.fileno()).st_uid
    except OSError as error:
        raise ConfigError(f"the run's folder {folder} cannot be written to ({error.strerror}): {_OTHERS}") from error
