"""Tries to write a checkpoint: each writes beside the checkpoint's place, which names what is whole alone.

A try has a folder of its own, whose name begins with a dot, and ends in ``.part`` until all of it is there.
"""

from __future__ import annotations

import glob
import shutil
from collections.abc import Callable
from pathlib import Path


class Try:
    """One try to write the checkpoint ``place``, by a ``name`` that no other has.

    Attributes:
        part: where it writes.
        whole: where all of it is then, until it gets its name.
    """

    def __init__(self, place: Path, name: str) -> None:
        self.place = place
        self.whole = place.with_name(f".{place.name}.{name}")
        self.part = place.with_name(f"{self.whole.name}.part")

    @property
    def found(self) -> Path:
        """Where the checkpoint is, which all know to be whole: who names it may have died before. What has its name
        then is none, or an older one."""
        return self.whole if self.whole.exists() else self.place

    def finish(self, whole: Callable[[str], None], keeps: bool = False) -> None:
        """Give what is written its name, once ``whole`` was called with that; ``keeps`` as in `give_name`."""
        self.part.rename(self.whole)
        whole(str(self.place.absolute()))  # only names are given from here on, which need no room
        give_name(self.whole, self.place, keeps)


def give_name(hidden: Path, place: Path, keeps: bool = False) -> None:
    """Give what is whole its name; what had it before goes, and what other tries have left. ``keeps``: but for files of
    the one before that this one has not, the script's own beside stock's."""
    old = hidden.with_name(f"{hidden.name}.old")
    if place.exists():
        place.rename(old)
    hidden.rename(place)
    for left in [*old.iterdir()] if keeps and old.exists() else []:
        if not (place / left.name).exists():
            left.rename(place / left.name)
    remove_tries(place)


def remove_tries(place: Path, ending: str = "") -> None:
    """Remove what tries to write the checkpoint ``place`` have left, if its name has this ``ending``."""
    for left in place.parent.glob(f".{glob.escape(place.name)}.*{ending}"):
        shutil.rmtree(left, ignore_errors=True)
