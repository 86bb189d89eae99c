"""Tries to write a checkpoint beside its place, so that the place's name stands for whole checkpoints only.

A try has a folder of its own, whose name begins with a dot, and ends in ``.part`` until all of it is there.
"""

from __future__ import annotations

import glob
import shutil
from collections.abc import Callable
from pathlib import Path


class Try:
    """One try to write the checkpoint ``place``, with a unique ``name``.

    Attributes:
        part: the folder for writing.
        whole: the folder of the complete checkpoint, until it gets its name.
    """

    def __init__(self, place: Path, name: str) -> None:
        self.place = place
        self.whole = place.with_name(f".{place.name}.{name}")
        self.part = place.with_name(f"{self.whole.name}.part")

    @property
    def found(self) -> Path:
        """The folder of the checkpoint, once all workers know it to be whole. The worker that names it may have died
        before: then ``place`` is missing, or an older checkpoint."""
        return self.whole if self.whole.exists() else self.place

    def finish(self, whole: Callable[[str], None], keeps: bool = False) -> None:
        """Call ``whole`` with the place, and rename the written folder to it; ``keeps`` as in `give_name`."""
        self.part.rename(self.whole)
        whole(str(self.place.absolute()))  # only renames follow, which need no room
        give_name(self.whole, self.place, keeps)


def give_name(hidden: Path, place: Path, keeps: bool = False) -> None:
    """Rename the complete folder ``hidden`` to ``place``, and remove its predecessor and other tries' remains.
    ``keeps``: keep those of the predecessor's files that the new folder lacks, the script's own beside stock's."""
    old = hidden.with_name(f"{hidden.name}.old")
    if place.exists():
        place.rename(old)
    hidden.rename(place)
    for left in [*old.iterdir()] if keeps and old.exists() else []:
        if not (place / left.name).exists():
            left.rename(place / left.name)
    remove_tries(place)


def remove_tries(place: Path, ending: str = "") -> None:
    """Remove the remains of tries to write the checkpoint ``place``, if their names have this ``ending``."""
    for left in place.parent.glob(f".{glob.escape(place.name)}.*{ending}"):
        shutil.rmtree(left, ignore_errors=True)
