"""Workers' log files: shown while they grow, and the last words of a failed process.

Files, not pipes: a worker never blocks on a slow reader of its output.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_recycle.observe.text import one_line

_CHUNK = 1 << 13
_LONGEST_LINE = 1 << 16
"""Bytes after which a line is shown though it has not ended."""
_TURN, _LAST_TURN = 0.2, 5.0
"""Seconds for showing what is new in a log that grows, and in one that has ended."""
_BEHIND = 1 << 24
"""Bytes that may wait for being shown: a worker can print faster than a terminal shows it."""
_TAIL = 8192
_LONGEST = 300
_ENDS = re.compile(r"(?:\[rank\d+\]: )?((?:\w+\.)*\w+(?:Error|Exception|Interrupt)(?::.*)?)")
"""A line that ends a traceback; torch puts the rank before it."""
_REFUSES = re.compile(r"(?:(?:python -m )?megatron[-_]recycle|\S+\.py: error): (.+)")
"""A line in which this plugin, or argparse in the script, says why it does not start."""


class Follower:
    """Shows log files of workers as they grow.

    `show` is "none", "all", or "first": the first live rank, the next one when it has ended, and besides the logging
    rank (with Megatron not the first rank).
    """

    def __init__(self, folder: Path, show: str, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._show = show
        self._say = say
        self._read: dict[int, int] = {}
        self._rest: dict[int, bytes] = {}
        self._begun = False
        self._speaker: int | None = None

    def logs_from(self, rank: int, offset: int) -> None:
        """From now on `rank` writes the log lines, in its file from byte `offset` on."""
        if self._show == "first":
            self._speaker = rank
            self._read[rank] = max(self._read.get(rank, 0), offset)

    def poll(self, live: Sequence[int], last: bool = False) -> None:
        """Show new lines; `live` are the ranks that may be shown, in order. The `last` call shows the ends, too."""
        if self._show == "none" or not live:
            return
        if self._show == "all":
            for rank in live:
                self._forward(rank, f"[rank {rank}] ", last)
            return
        shown = {min(live)} if self._speaker is None else {min(live), self._speaker}
        for rank in self._read.keys() - shown:
            self._forward(rank, "", last=True)
            del self._read[rank]
        for rank in sorted(shown):
            if self._begun:
                # Earlier lines of the next rank are not shown.
                self._read.setdefault(rank, self._size(rank))
            self._forward(rank, "", last)
        self._begun = True

    def _path(self, rank: int) -> Path:
        return self._folder / f"worker-{rank}.log"

    def _size(self, rank: int) -> int:
        try:
            return self._path(rank).stat().st_size
        except OSError:
            return 0

    def _forward(self, rank: int, prefix: str, last: bool) -> None:
        """Show what is new in a log. Its disk may be full or gone, and anybody may have emptied or removed it."""
        until = time.monotonic() + (_LAST_TURN if last else _TURN)
        with suppress(OSError), self._path(rank).open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._read.setdefault(rank, 0):
                self._read[rank] = 0
            file.seek(self._read[rank])
            while time.monotonic() < until and (data := file.read(_CHUNK)):
                self._read[rank] = file.tell()
                *lines, rest = (self._rest.get(rank, b"") + data).split(b"\n")
                if len(rest) > _LONGEST_LINE:
                    lines, rest = [*lines, rest], b""
                self._rest[rank] = rest
                for line in lines:
                    self._say(prefix + line.decode(errors="replace"))
            left = os.fstat(file.fileno()).st_size - self._read[rank]
            if time.monotonic() >= until and left > (0 if last else _BEHIND):
                self._read[rank] += left
                self._say(f"{prefix}[recycle: {left} bytes are left out here, see {self._path(rank)}]")


def last_words(log: Path) -> str:
    """The error that ended the process of this log, e.g. ``ModuleNotFoundError: No module named 'x'``; empty without a
    traceback or a refusal in its last line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    last = next((line for line in reversed(lines) if line.strip()), "").rstrip()
    if (refusal := _REFUSES.fullmatch(last)) is not None:
        return one_line(refusal[1], _LONGEST)
    if not any("Traceback (most recent call last)" in line for line in lines):
        return ""
    return next((one_line(match[1], _LONGEST) for line in reversed(lines) if (match := _ENDS.fullmatch(line.rstrip()))),
                "")
