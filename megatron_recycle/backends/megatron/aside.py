"""A checkpoint of Megatron-LM's, written beside its place until all of it is there.

Stock writes into ``iter_N`` from the first file on, and names N the newest one when every rank has written. Here it
writes into a folder whose name begins with a dot, one for each try, which gets its name when stock is about to name it.
Nothing of Megatron is imported here.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TRACKER = "latest_checkpointed_iteration.txt"


def place_of(folder: str, iteration: int) -> Path:
    """The checkpoint of ``iteration`` in ``folder``."""
    return Path(folder).absolute() / f"iter_{iteration:07d}"


@contextmanager
def aside(stock: Any, folder: str, iteration: int, name: str, whole: Callable[[str], None]) -> Iterator[None]:
    """Inside the block stock's `save_checkpoint` writes ``iteration`` into ``folder`` in this way.

    Args:
        stock: Megatron-LM's module of checkpoints.
        name: of this try, which no other has.
        whole: called with the checkpoint's place before it gets its name, by the rank that names it. What it raises
            leaves the one before named.
    """
    place = place_of(folder, iteration)
    hidden = place.with_name(f".{place.name}.{name}")
    name_of, open_file = stock.get_checkpoint_name, stock.open_file
    succeed = stock.wandb_utils.on_save_checkpoint_success
    remote = "://" in folder  # an object store has no folders that could be renamed

    def get_checkpoint_name(path: str, number: int, *given: Any, **keywords: Any) -> str:
        found: str = name_of(path, number, *given, **keywords)
        inside, own = os.path.join(path, place.name), not remote and path == folder and number == iteration
        return os.path.join(path, hidden.name) + found[len(inside):] if own and found.startswith(inside) else found

    def open_(path: Any, mode: str = "r", *given: Any, **keywords: Any) -> Any:
        if "w" not in mode or os.path.basename(path) != TRACKER:
            return open_file(path, mode, *given, **keywords)
        whole(str(place))
        if remote:
            return open_file(path, mode, *given, **keywords)
        _name(hidden, place)
        return _replaced(Path(path))

    def on_save_checkpoint_success(path: str, *given: Any, **keywords: Any) -> Any:
        return succeed(str(path).replace(hidden.name, place.name), *given, **keywords)

    stock.get_checkpoint_name, stock.open_file = get_checkpoint_name, open_
    stock.wandb_utils.on_save_checkpoint_success = on_save_checkpoint_success
    try:
        yield
    finally:
        stock.get_checkpoint_name, stock.open_file = name_of, open_file
        stock.wandb_utils.on_save_checkpoint_success = succeed


def _name(hidden: Path, place: Path) -> None:
    """Give what is whole its name; what had it before goes."""
    old = hidden.with_name(f"{hidden.name}.old")
    if place.exists():
        place.rename(old)
    hidden.rename(place)
    remove_tries(place)


def remove_tries(place: Path) -> None:
    """Remove what tries to write the checkpoint ``place`` have left, which a failure has ended."""
    for left in place.parent.glob(f".{glob.escape(place.name)}.*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _replaced(path: Path) -> Iterator[Any]:
    """A text file that is the old one until all of the new one is written."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w") as file:
        yield file
    os.replace(part, path)
