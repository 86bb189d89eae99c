"""Shows the workers' output while it is written to their log files.

Files, not pipes: a worker never waits for somebody to read what it prints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

_CHUNK = 1 << 16


class Follower:
    """`show` is "none", "all", or "first": the first rank that lives, and the next one when it has ended."""

    def __init__(self, folder: Path, show: str, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._show = show
        self._say = say
        self._read: dict[int, int] = {}
        self._rest: dict[int, bytes] = {}

    def poll(self, live: Sequence[int]) -> None:
        """Show what is new; `live` are the ranks that may be shown, in order."""
        if self._show == "none" or not live:
            return
        if self._show == "all":
            for rank in live:
                self._forward(rank, f"[rank {rank}] ")
            return
        first = min(live)
        if self._read and first not in self._read:
            # What the next rank has printed before is not shown again.
            for rank in tuple(self._read):
                self._forward(rank, "")
            self._read = {first: self._size(first)}
        self._forward(first, "")

    def _path(self, rank: int) -> Path:
        return self._folder / f"worker-{rank}.log"

    def _size(self, rank: int) -> int:
        return self._path(rank).stat().st_size

    def _forward(self, rank: int, prefix: str) -> None:
        with self._path(rank).open("rb") as file:
            file.seek(self._read.get(rank, 0))
            while data := file.read(_CHUNK):
                self._read[rank] = file.tell()
                *lines, rest = (self._rest.get(rank, b"") + data).split(b"\n")
                self._rest[rank] = rest
                for line in lines:
                    self._say(prefix + line.decode(errors="replace"))
        self._read.setdefault(rank, 0)
