"""Where all threads of this process stand, written into the run's folder when the job fails."""

from __future__ import annotations

import contextlib
import faulthandler
import os
from pathlib import Path

FOLDER = "post-mortem"
"""The folder in a run's folder; see `launch.post_mortem`."""


def write_stacks(run_dir: str | os.PathLike[str], rank: int) -> None:
    """Write the stacks of all threads to RUN_DIR/post-mortem/stack-RANK-PID.txt, if the disk takes it."""
    with contextlib.suppress(OSError):
        folder = Path(run_dir) / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        with (folder / f"stack-{rank}-{os.getpid()}.txt").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
