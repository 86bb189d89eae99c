"""Stacks of all threads of this process: sent on request, and written into the run's folder when the job fails."""

from __future__ import annotations

import contextlib
import faulthandler
import os
from pathlib import Path

FOLDER = "post-mortem"
"""The folder in a run's folder; see `tools.post_mortem`."""
_MOST = 1 << 16
"""Most bytes of stacks that are sent."""


def stacks() -> str:
    """The stacks of all threads of this process, as text; cut off where that would be very long."""
    with os.fdopen(os.memfd_create("stacks"), "w+b") as file:  # the disk may be full, and its folder gone
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read(_MOST).decode(errors="replace")


def write_stacks(run_dir: str | os.PathLike[str], rank: int) -> None:
    """Write the stacks of all threads to RUN_DIR/post-mortem/stack-RANK-PID.txt, if the disk takes it."""
    with contextlib.suppress(OSError):
        folder = Path(run_dir) / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        with (folder / f"stack-{rank}-{os.getpid()}.txt").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
