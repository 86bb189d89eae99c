"""Text of unknown origin, made fit for a terminal."""

from __future__ import annotations

import re

_SEQUENCE = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` without commands to a terminal: escape sequences and control characters other than tab and newline.

    A worker's error or hint may hold colours, or bytes from untrusted data.
    """
    return _CONTROL.sub("", _SEQUENCE.sub("", text))


def one_line(text: str, most: int | None = None) -> str:
    """`printable` text on one line, without runs of spaces, so that it cannot pass for a line of ours.

    `most`: characters after which it is cut off, with dots.
    """
    line = " ".join("".join(each if each.isprintable() else " " for each in _SEQUENCE.sub("", text)).split())
    return line if most is None or len(line) <= most else line[:most - 3].rstrip() + "..."
