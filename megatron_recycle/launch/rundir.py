"""The folder of a run: events.jsonl, journal.jsonl, a log per worker, the plans."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megatron_recycle.errors import ConfigError
from megatron_recycle.membership import Journal, JournalError, JournalInUse

_OURS = ("journal.jsonl", "events.jsonl", "coordinator.log", "worker-*.log", "plans", "chaos.jsonl", "chaos.log",
         "chaos")


def make(run_dir: Path) -> None:
    """Make the folder if it is not there. Raises ConfigError if it cannot be made, or not be written to."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the run's folder {run_dir} cannot be made ({error.strerror}): choose another --run-dir"
                          ) from error
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise ConfigError(f"the run's folder {run_dir} cannot be written to: choose another --run-dir")


def prepare(run_dir: Path) -> None:
    """Make the folder; files of an earlier run in it move to a folder `before-<time>` inside.

    Raises:
        ConfigError: a job is running there, or the folder cannot be made.
    """
    make(run_dir)
    journal = run_dir / "journal.jsonl"
    if journal.exists():
        try:
            Journal.reopen(journal).close()
        except JournalInUse as error:
            raise ConfigError(f"a job is running in {run_dir}: choose another --run-dir") from error
        except JournalError:
            pass  # damaged, but nobody's
    old = [path for pattern in _OURS for path in sorted(run_dir.glob(pattern))]
    if not old:
        return
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(max(path.stat().st_mtime for path in old)))
    aside = run_dir / f"before-{stamp}"
    aside.mkdir(exist_ok=True)
    for path in old:
        path.replace(aside / path.name)
