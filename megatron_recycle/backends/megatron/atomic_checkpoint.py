"""A checkpoint of Megatron-LM's, written beside its place until all of it is there.

Stock writes into ``iter_N`` from the first file on, and names N the newest one when every rank has written. Here each
try writes into a folder of its own, whose name begins with a dot and ends in ``.part`` until all of it is there. It
gets its name when stock is about to name it. Nothing of Megatron is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from megatron_recycle.backends.patching import replaced
from megatron_recycle.backends.tries import Try, remove_tries

TRACKER = "latest_checkpointed_iteration.txt"
FOLDER = "iter_"
"""The beginning of a checkpoint folder's name; its iteration follows."""


def place_of(folder: str, iteration: int) -> Path:
    """The checkpoint of ``iteration`` in ``folder``."""
    return Path(folder).absolute() / f"{FOLDER}{iteration:07d}"


@contextmanager
def aside(stock: Any, folder: str, iteration: int, name: str, whole: Callable[[str], None]) -> Iterator[None]:
    """Inside the block stock's `save_checkpoint` writes ``iteration`` into ``folder`` atomically.

    Args:
        stock: Megatron-LM's module of checkpoints.
        name: of this try, unique.
        whole: called with the checkpoint's place by the rank that names it, before it does. After an error in it the
            previous checkpoint stays named.
    """
    written = Try(place_of(folder, iteration), name)
    open_file, succeed = opener(stock), stock.wandb_utils.on_save_checkpoint_success
    remote = "://" in folder  # an object store has no folders to rename

    def open_(path: Any, mode: str = "r", *given: Any, **keywords: Any) -> Any:
        if "w" not in mode or os.path.basename(path) != TRACKER:
            return open_file(path, mode, *given, **keywords)
        if remote:
            whole(f"{folder}/{written.place.name}")
            return open_file(path, mode, *given, **keywords)
        return _rewritten(Path(path), lambda: written.finish(whole))

    def on_save_checkpoint_success(path: str, *given: Any, **keywords: Any) -> Any:
        return succeed(str(path).replace(written.part.name, written.place.name), *given, **keywords)

    with (replaced(stock.wandb_utils, on_save_checkpoint_success=on_save_checkpoint_success), opening(stock, open_),
          nullcontext() if remote else renamed(stock, folder, iteration, written.part.name)):
        yield


class _Files:
    """Replacement of Megatron-LM's object for file access since core 0.19."""

    def __init__(self, stock: Any, open_file: Callable[..., Any]) -> None:
        self._stock = stock
        self.open = open_file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def opener(stock: Any) -> Callable[..., Any]:
    """The function by which ``stock``, Megatron-LM's module of checkpoints, opens files."""
    found: Callable[..., Any] = stock.open_file if hasattr(stock, "open_file") else stock.maybe_msc.open
    return found


def opening(stock: Any, open_file: Callable[..., Any]) -> AbstractContextManager[None]:
    """Inside the block ``stock`` opens files with ``open_file``."""
    if hasattr(stock, "open_file"):
        return replaced(stock, open_file=open_file)
    return replaced(stock, maybe_msc=_Files(stock.maybe_msc, open_file))


def renamed(stock: Any, folder: str, number: int, to: str) -> AbstractContextManager[None]:
    """Inside the block stock finds the checkpoint of iteration ``number`` in ``folder`` under the name ``to``."""
    name_of, own = stock.get_checkpoint_name, place_of(folder, number).name

    def get_checkpoint_name(checkpoints_path: str, iteration: int, *given: Any, **keywords: Any) -> str:
        found: str = name_of(checkpoints_path, iteration, *given, **keywords)
        inside = os.path.join(checkpoints_path, own)
        return os.path.join(checkpoints_path, to) + found[len(inside):] if (
            (checkpoints_path, iteration) == (folder, number) and found.startswith(inside)) else found

    return replaced(stock, get_checkpoint_name=get_checkpoint_name)


def found_at(place: str, name: str) -> str:
    """The folder name of the checkpoint of the try ``name`` for ``place``, once all workers know it to be whole. The
    rank that names it may have died before: then ``place`` is missing, or an older checkpoint."""
    return Path(place).name if "://" in place else Try(Path(place), name).found.name


@contextmanager
def read_from(stock: Any, folder: str, iteration: int, name: str) -> Iterator[None]:
    """Inside the block stock loads the checkpoint of ``iteration`` from the folder ``name`` in ``folder``, even if it
    is not the newest."""
    with (replaced(stock, read_metadata=lambda *given, **keywords: (iteration, False)),
          renamed(stock, folder, iteration, name)):
        yield


def remove_parts(place: Path) -> None:
    """Remove the incomplete remains of tries to write the checkpoint ``place``."""
    remove_tries(place, ".part")
    with suppress(OSError):
        place.with_name(f"{TRACKER}.part").unlink()


@contextmanager
def _rewritten(path: Path, then: Callable[[], None]) -> Iterator[Any]:
    """A text file that keeps its old content until all of the new one is written, and ``then`` has been called."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w") as file:
        yield file
    then()
    os.replace(part, path)
