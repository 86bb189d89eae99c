"""The last words of a failed process: a refusal, or the end of the last traceback in its log."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron_recycle.observe.text import one_line

_TAIL = 8192
_LONGEST = 300
_ENDS = re.compile(r"(?:\[rank\d+\]: )?((?:\w+\.)*\w+(?:Error|Exception|Interrupt)(?::.*)?)")
"""A line that ends a traceback; torch puts the rank before it."""
_REFUSES = re.compile(r"(?:(?:python -m )?megatron[-_]recycle|\S+\.py: error): (.+)")
"""A line in which this plugin, or argparse in the script, says why it does not begin."""


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
