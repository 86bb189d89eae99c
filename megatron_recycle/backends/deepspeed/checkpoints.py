"""Checkpoints of a DeepSpeed job, which stock loads as any other, also if workers were missing.

The files are stock's, written by stock's code. It assigns files to data-parallel ranks, some of which may be dead: here
these are the ranks among a stage's live workers. All of it is written into a folder of its own, whose name begins with
a dot, and gets the checkpoint's name when complete; ``latest`` comes last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.pipe.engine import PipelineEngine

from megatron_recycle.backends.checkpoint_files import newest_readable, unreadable
from megatron_recycle.backends.deepspeed.chunks import chunks_of
from megatron_recycle.backends.deepspeed.optimizer_checkpoint import written_shard
from megatron_recycle.backends.patching import replaced
from megatron_recycle.backends.tries import Try, give_name, remove_tries
from megatron_recycle.errors import RecycleError, SaveError
from megatron_recycle.observe.disk import unwritten
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.reduction import count
from megatron_recycle.runtime.saving import Save

_POINTER = "latest.part"


class Checkpoints:
    """Knows where a script saves, and saves there.

    Args:
        engine: the script's.
        wanted: the folder that the configuration names for a last checkpoint; None: the script's last folder.
    """

    def __init__(self, engine: PipelineEngine, wanted: str | None) -> None:
        self._engine = engine
        self._wanted = wanted
        self._folder: str | None = None
        self._saved: tuple[int, str] | None = None
        self._place: Path | None = None  # of the checkpoint that is being written

    @property
    def folder(self) -> str | None:
        """The folder of a last checkpoint; None if no folder is known."""
        return self._wanted or self._folder

    def seen(self, folder: Any) -> None:
        """Note that the script saves to ``folder``."""
        self._folder = str(folder)

    def saved(self, tag: str | None) -> None:
        """Note that the script has just saved."""
        self._saved = self._engine.global_steps, self._tag(tag)

    def loaded(self) -> None:
        """Note that the script has loaded a checkpoint: its next save may be another state of the same step."""
        self._saved = None

    def unreadable(self, folder: Any, tag: str) -> str | None:
        """The reason why this worker's files of a checkpoint cannot be read; None if they can. Where a stage's
        optimizer state is missing, stock takes another stage's."""
        engine, module = self._engine, self._engine.module
        state = Path(engine._get_ckpt_name(str(folder), tag))
        place = state.parent
        layers = [module.ckpt_layer_path_list(str(place), index) or [module.ckpt_layer_path(str(place), index)]
                  for index, layer in enumerate(module.forward_funcs) if hasattr(layer, "load_state_dict")]
        part = state.name.removeprefix("mp_rank_").split("_")[0]
        shards = place.glob(f"*zero_pp_rank_*_mp_rank_{part}_optim_states.pt")
        # With two chunks, layers saved by a job without them are in other stages' files.
        others = [place / f"mp_rank_{rank:02d}_model_states.pt" for rank in range(
            engine.mp_world_size if chunks_of(module) is not None else 0)]
        return unreadable([state, *others, *(file for files in layers for file in files), *shards])

    def readable(self, folder: Any) -> str | None:
        """The newest checkpoint in ``folder`` that all workers can read, ``latest``'s first; None if there is none."""
        place = Path(folder)
        try:
            latest = (place / "latest").read_text().strip()
            others = {one.name: one.stat().st_mtime for one in place.iterdir()
                      if one.name != latest and not one.name.startswith(".") and any(one.glob("mp_rank_*"))}
        except OSError:
            latest, others = "", {}
        older = sorted(others, key=lambda name: others[name], reverse=True)
        return newest_readable(str(folder), [latest, *older] if latest else [],
                               lambda tag: self.unreadable(folder, tag), self._engine.device)

    def is_later_than_universal(self, folder: Any, tag: str) -> bool:
        """Whether a checkpoint was written after the universal one that ``folder`` names."""
        named = Path(folder, "latest_universal")
        return not named.exists() or Path(folder, tag).stat().st_mtime > named.stat().st_mtime

    def write(self, save: Save, save_dir: Any, tag: Any = None, client_state: Mapping[str, Any] | None = None,
              save_latest: bool = True, exclude_frozen_parameters: bool = False) -> bool:
        """Write this worker's part of stock's `save_checkpoint` files, together with all members of ``save``, the only
        workers that torch sees meanwhile. Returns True. Raises GenerationOver, NotWritten, and stock's errors."""
        groups, tags = save.generation.groups, [self._tag(tag)]
        self._engine._checkpoint_tag_validation(tags[0])
        dist.broadcast_object_list(tags)  # one folder for all, even if a tag contains the time, say
        place = self._place = Path(save_dir, tags[0])
        path, written = str(place.absolute()), Try(place, save.name)
        with save.all_write(path):
            self._write_stage(groups, save_dir, written.part, tags[0], dict(client_state or {}),
                              exclude_frozen_parameters, save.check)
        with save.all_write(path):
            if groups.me == groups.members[0] and groups.part == 0:
                latest = _pointer(save_dir, tags[0]) if save_latest else None
                written.finish(save.whole, keeps=True)
                if latest is not None:
                    os.replace(latest, Path(save_dir, "latest"))
        return True

    def clear(self) -> None:
        """Remove the remains of the checkpoint that cannot be written."""
        if self._place is not None:
            _remove_parts(self._place)

    def write_last(self, groups: Groups) -> str:
        """Write this worker's part of a last checkpoint, at the same time as all of ``groups``. Returns the
        checkpoint's folder, or nothing if another worker could not write its own part.

        Raises RecycleError where the job has no folder for it, SaveError where this worker cannot write, GenerationOver
        if another worker is lost meanwhile.
        """
        folder, tag = self.folder, self._tag(None)
        done = self._wanted is None and self._saved is not None and self._saved[0] == self._engine.global_steps
        # Not Path.exists(), which raises on an unreadable folder: here alone, while the others are in count().
        taken = folder is not None and os.path.exists(os.path.join(folder, tag))
        nowhere, already, exists = count(groups.control, folder is None, done, taken)
        if nowhere or folder is None:
            raise RecycleError("the script has not saved before; give --recycle-emergency-checkpoint DIR")
        if already:  # a worker that came in afterwards does not know its name
            return str(Path(folder).absolute() / self._saved[1]) if done and self._saved is not None else ""
        if exists:  # of an earlier life, perhaps whole: it stays as it is
            tag += "_emergency"
        place = Path(folder, tag)
        part = Try(place, "last").part
        try:
            whole = _by_all(groups, partial(self._write_stage, groups, folder, part, tag))
            whole = whole and _by_all(groups, partial(_finish, part, place) if (
                groups.me == groups.members[0] and groups.part == 0) else None)
        except Exception as error:
            _remove_parts(place)
            if (reason := unwritten(error, place.absolute())) is not None:
                raise SaveError(reason) from error
            raise
        if not whole:
            _remove_parts(place)
        return str(place.absolute()) if whole else ""  # the worker that could not write says why

    def _tag(self, tag: Any) -> str:
        return f"global_step{self._engine.global_steps}" if tag is None else str(tag)

    def _write_stage(self, groups: Groups, folder: Any, hidden: Path, tag: str,
                     client_state: Mapping[str, Any] | None = None, exclude_frozen_parameters: bool = False,
                     check: Callable[[], None] = lambda: None) -> None:
        """Write this worker's share of its stage's files into ``hidden``, inside of ``folder``."""
        engine, peers = self._engine, groups.peers(groups.me.stage)
        commit = CheckpointCommitInfo(tag=tag, save_dir=folder, save_latest=True)
        engine.checkpoint_engine.makedirs(str(hidden), exist_ok=True)
        engine.checkpoint_engine.create(commit)
        rank, size = peers.index(groups.me), len(peers)
        # To stock, this worker is the data-parallel rank of its place among its live peers.
        with (replaced(engine.grid, data_parallel_id=rank, data_parallel_size=size),
              replaced(engine, save_non_zero_checkpoint=rank == 0), _checked(engine.checkpoint_engine, check)):
            engine._save_checkpoint(str(folder), os.path.relpath(hidden, folder), client_state=client_state or {},
                                    exclude_frozen_parameters=exclude_frozen_parameters)
            self._write_shards(groups, folder, os.path.relpath(hidden, folder))
        engine.checkpoint_engine.commit(commit)

    def _write_shards(self, groups: Groups, folder: Any, tag: str) -> None:
        """Write the optimizer shards that this worker speaks for, each in the file of its rank by stock: a live holder
        writes for dead ranks."""
        engine = self._engine
        cuts = engine.session.worker.cuts
        if cuts is None:
            return
        for shard in cuts.spoken_for(groups.me):
            name = engine._get_rank_zero_ckpt_name(str(folder), tag, engine.checkpoint_mp_rank, shard,
                                                   engine.bfloat16_enabled())
            state = written_shard(engine, engine.optimizer.state_dict(shard))
            engine.checkpoint_engine.save({"optimizer_state_dict": state,
                                           "ds_config": engine.config, "ds_version": deepspeed.__version__}, name)
        if groups.me == groups.members[0] and groups.part == 0:
            engine._copy_recovery_script(str(folder))


def _remove_parts(place: Path) -> None:
    """Remove the incomplete remains of tries to write the checkpoint ``place``."""
    remove_tries(place, ".part")
    with suppress(OSError):
        place.with_name(_POINTER).unlink()


def _finish(hidden: Path, place: Path) -> None:
    latest = _pointer(place.parent, place.name)
    give_name(hidden, place, keeps=True)
    os.replace(latest, place.parent / "latest")


def _pointer(folder: Any, tag: str) -> Path:
    """A file that makes ``tag`` the default checkpoint to load, once it is renamed to ``latest``."""
    path = Path(folder, _POINTER)
    path.write_text(tag)
    return path


def _by_all(groups: Groups, write: Callable[[], None] | None) -> bool:
    """Run ``write``, if given. Returns whether it succeeded on all workers. An error here is raised after the others
    know of it, since they would wait for this worker."""
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


def _checked(writer: Any, check: Callable[[], None]) -> AbstractContextManager[None]:
    """Inside the block `check` is called before each file."""
    save = writer.save

    def checked(*given: Any, **keywords: Any) -> Any:
        check()
        return save(*given, **keywords)

    return replaced(writer, save=checked)
