"""The way back to a checkpoint that Megatron-LM's own loop has written in this job: a stage has lost its last worker.

Stock's `load_checkpoint` loads model and optimizer, among the live workers. Other state that it sets (counters of
samples, the scheduler, the number of micro-batches, rates) belongs to the loop, which does not go back: the iterations
since then are repeated behind it, each with its original rates.

Nothing of Megatron is imported here.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from megatron_recycle.backends.checkpoint_files import newest_readable, unreadable
from megatron_recycle.backends.megatron.atomic_checkpoint import FOLDER, TRACKER, found_at, read_from
from megatron_recycle.backends.megatron.final_checkpoint import Beginning, what_failed
from megatron_recycle.backends.megatron.rates import SET_BY_LOOP
from megatron_recycle.errors import RecycleError

_AS_SAVED = {
    "finetune": False, "no_load_optim": False, "no_load_rng": True, "non_persistent_ckpt_type": None,
    "pretrained_checkpoint": None, "exit_on_missing_checkpoint": False,
}
"""Arguments set for loading, whatever the job's own say about its first checkpoint. Random numbers are by place."""


_COMMON = "common_state/"
"""Prefix of state shared by all ranks, in checkpoints of core 0.19; in older ones it is in a file."""


def possible(arguments: Any) -> bool:
    """Whether checkpoints of a job with these ``arguments`` hold all state that training needs."""
    whole = not (arguments.no_save_optim or arguments.data_parallel_random_init)
    return whole and arguments.ckpt_format in ("torch", "torch_dist")


def load(loop: Any, stock: Any, beginning: Beginning, place: str, name: str) -> int:
    """Load this worker's part of the checkpoint at ``place``, or of the try ``name`` for it if not yet renamed, at the
    same time as all live workers. Returns its iteration, by the loop's count.

    Args:
        loop: Megatron-LM's module of training.
        stock: its module of checkpoints.

    Raises RecycleError if it cannot be read, and stock's errors.
    """
    arguments, parts = loop.get_args(), beginning.parts
    folder, _, last = place.rpartition("/")
    iteration = int(last.removeprefix(FOLDER))
    with _kept(loop, stock, arguments, parts["optimizer"]), read_from(stock, folder, iteration, found_at(place, name)):
        vars(arguments).update(_AS_SAVED, load=folder, ckpt_step=iteration)
        try:
            found, _ = stock.load_checkpoint(parts["model"], parts["optimizer"], None)
        except SystemExit:  # stock's reaction to an unreadable file; it has printed the reason
            raise RecycleError(f"the checkpoint in {place} cannot be read; the worker's log says why") from None
        except CheckpointException as error:  # a BaseException, but no Exception
            raise RuntimeError(what_failed(error) or str(error)) from error
    if found != iteration:
        raise RecycleError(f"the checkpoint in {place} is not to be found any more, or not on this host: keep "
                           "checkpoints on a file system that all hosts share")
    return iteration


def readable(stock: Any, arguments: Any) -> int | None:
    """The iteration of the newest checkpoint in ``--load`` that all ranks can read; None: there is none, or the script
    has chosen one. All ranks call this together."""
    folder = arguments.load
    if folder is None or arguments.ckpt_step or "://" in folder:
        return None
    try:
        newest = int((Path(folder) / TRACKER).read_text())
        found = {int(one.name.removeprefix(FOLDER)) for one in Path(folder).glob(f"{FOLDER}[0-9]*")}
    except (OSError, ValueError):
        return newest_readable(folder, [], lambda iteration: None, torch.cuda.current_device())
    older = sorted((one for one in found if one < newest), reverse=True)
    return newest_readable(folder, [newest, *older], lambda iteration: _unreadable(stock, folder, iteration),
                           torch.cuda.current_device())


def _unreadable(stock: Any, folder: str, iteration: int) -> str | None:
    """The reason why this rank's files of a checkpoint cannot be read; None if they can."""
    place = Path(stock.get_checkpoint_name(folder, iteration, return_base_dir=True))
    if not (place / "metadata.json").exists():
        return unreadable([stock.get_checkpoint_name(folder, iteration)])
    sizes: dict[str, int] = {}
    try:
        metadata = FileSystemReader(place).read_metadata()
        for one in metadata.storage_data.values():
            file = str(place / one.relative_path)
            sizes[file] = max(sizes.get(file, 0), one.offset + one.length)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        return f"{place / '.metadata'}: {error}"
    inside = any(name.startswith(_COMMON) for name in metadata.state_dict_metadata)
    return unreadable([*([] if inside else [place / "common.pt"]), *sizes], sizes)


@contextmanager
def _kept(loop: Any, stock: Any, arguments: Any, optimizer: Any) -> Iterator[None]:
    """A block that restores all state at its end, except the stage's own."""
    before, loaded = dict(vars(arguments)), stock.get_loaded_iteration()
    rates = [{key: group[key] for key in SET_BY_LOOP if key in group} for group in optimizer.param_groups]
    try:
        yield
    finally:
        vars(arguments).clear()
        vars(arguments).update(before)
        stock.set_loaded_iteration(loaded)
        loop.update_num_microbatches(consumed_samples=arguments.consumed_train_samples, verbose=False)
        for group, values in zip(optimizer.param_groups, rates, strict=True):
            group.update(values)
