"""What a process that has failed says last: how the last traceback in its log ends."""

from __future__ import annotations

import os
import re
from pathlib import Path

_TAIL = 8192
_LONGEST = 300
_ENDS = re.compile(r"(?:\[rank\d+\]: )?((?:\w+\.)*\w+(?:Error|Exception|Interrupt)(?::.*)?)")
"""A line that ends a traceback; torch puts the rank before it."""


def last_words(log: Path) -> str:
    """E.g. ``ModuleNotFoundError: No module named 'x'``; nothing if the log does not end with a traceback."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    if not any("Traceback (most recent call last)" in line for line in lines):
        return ""
    found = next((match[1] for line in reversed(lines) if (match := _ENDS.fullmatch(line.rstrip()))), "")
    return found if len(found) <= _LONGEST else found[:_LONGEST - 3] + "..."
