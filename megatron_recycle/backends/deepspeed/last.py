"""The last checkpoint of a job that cannot go on, which stock DeepSpeed loads as any other.

The files are stock's, written by stock's code. Which worker writes which it tells by data-parallel ranks, and those may
be gone; here each stage's lowest live worker writes all of that stage's, as if it were the only pipeline. ``latest`` is
written when all files are there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.pipe.engine import PipelineEngine

from megatron_recycle.errors import RecycleError
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.reduction import count


class LastCheckpoint:
    """Knows where a script saves, and saves there.

    Args:
        engine: the script's.
        wanted: the folder that the configuration names; None: where the script has saved.
    """

    def __init__(self, engine: PipelineEngine, wanted: str | None) -> None:
        self._engine = engine
        self._wanted = wanted
        self._folder: str | None = None
        self._saved: tuple[int, str] | None = None

    def seen(self, folder: Any) -> None:
        """The script saves to ``folder``."""
        self._folder = str(folder)

    def saved(self, tag: str | None) -> None:
        """It has, with all workers, just now."""
        steps = self._engine.global_steps
        self._saved = steps, tag if tag is not None else f"global_step{steps}"

    def write(self, groups: Groups) -> str:
        """Write this worker's part, at the same time as all of ``groups``; returns the checkpoint's folder, or nothing
        if another worker could not write its own.

        Raises RecycleError where the job has no folder for it, OSError and what else torch raises where this worker
        cannot write, GenerationOver if another one is lost meanwhile.
        """
        folder, steps = self._wanted or self._folder, self._engine.global_steps
        tag = f"global_step{steps}"
        done = self._wanted is None and self._saved is not None and self._saved[0] == steps
        # Not Path.exists(), which raises where the folder cannot be looked into: here alone, while the others count.
        taken = folder is not None and os.path.exists(os.path.join(folder, tag))
        nowhere, already, exists = count(groups.control, folder is None, done, taken)
        if nowhere or folder is None:
            raise RecycleError("the script has not saved before; give --recycle-emergency-checkpoint DIR")
        if already:  # but one that came in afterwards does not know under which name
            return str(Path(folder).absolute() / self._saved[1]) if done and self._saved is not None else ""
        if exists:  # of an earlier life, perhaps whole: it stays as it is
            tag += "_emergency"
        own_stage = groups.me == groups.peers(groups.me.stage)[0]
        whole = _by_all(groups, partial(self._write_stage, folder, tag) if own_stage else None)
        whole = whole and _by_all(groups, partial(_point, folder, tag) if groups.me == groups.members[0] else None)
        return str(Path(folder).absolute() / tag) if whole else ""  # the one that could not says why

    def _write_stage(self, folder: str, tag: str) -> None:
        engine = self._engine
        commit = CheckpointCommitInfo(tag=tag, save_dir=folder, save_latest=True)
        engine.checkpoint_engine.makedirs(os.path.join(folder, tag), exist_ok=True)
        engine.checkpoint_engine.create(commit)
        with _as_only_pipeline(engine):
            engine._save_checkpoint(folder, tag)
        engine.checkpoint_engine.commit(commit)


def _point(folder: str, tag: str) -> None:
    """Make ``tag`` the checkpoint that is loaded by default."""
    latest = Path(folder) / "latest"
    latest.with_name("latest.part").write_text(tag)
    os.replace(latest.with_name("latest.part"), latest)


def _by_all(groups: Groups, write: Callable[[], None] | None) -> bool:
    """Run ``write``, if there is something to write here; whether nobody's has failed. Raises what this one has raised,
    once the others know of it: they would wait for this worker."""
    error: Exception | None = None
    try:
        if write is not None:
            write()
    except Exception as failure:  # noqa: BLE001 - whatever it is
        error = failure
    (failed,) = count(groups.control, error is not None)
    if error is not None:
        raise error
    return not failed


@contextmanager
def _as_only_pipeline(engine: PipelineEngine) -> Iterator[None]:
    """Inside the block stock takes this worker for the one that writes its stage's files."""
    grid = engine.grid
    before = grid.data_parallel_id, grid.data_parallel_size, engine.save_non_zero_checkpoint
    grid.data_parallel_id, grid.data_parallel_size, engine.save_non_zero_checkpoint = 0, 1, True
    try:
        yield
    finally:
        grid.data_parallel_id, grid.data_parallel_size, engine.save_non_zero_checkpoint = before
