"""The last words of a failed process: the end of the last traceback in its log."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron_recycle.observe.text import one_line

_TAIL = 8192
_LONGEST = 300
_ENDS = re.compile(r"(?:\[rank\d+\]: )?((?:\w+\.)*\w+(?:Error|Exception|Interrupt)(?::.*)?)")
"""A line that ends a traceback; torch puts the rank before it."""


def last_words(log: Path) -> str:
    """The error that ended the process of this log, e.g. ``ModuleNotFoundError: No module named 'x'``; empty without a
    traceback."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    if not any("Traceback (most recent call last)" in line for line in lines):
        return ""
    return next((one_line(match[1], _LONGEST) for line in reversed(lines) if (match := _ENDS.fullmatch(line.rstrip()))),
                "")
