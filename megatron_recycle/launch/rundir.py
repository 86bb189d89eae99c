"""The folder of a run: events.jsonl, journal.jsonl, a log per worker, the plans."""

from __future__ import annotations

import time
from pathlib import Path

from megatron_recycle.errors import ConfigError
from megatron_recycle.membership import Journal, JournalError, JournalInUse

_OURS = ("journal.jsonl", "events.jsonl", "coordinator.log", "worker-*.log", "plans", "chaos.jsonl", "chaos.log",
         "chaos")


def prepare(run_dir: Path) -> None:
    """Make the folder; files of an earlier run in it move to a folder `before-<time>` inside.

    Raises:
        ConfigError: a job is running there.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
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
