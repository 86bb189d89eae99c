"""Text that came from somewhere else, made fit for a terminal."""

from __future__ import annotations

import re

_SEQUENCE = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` without what a terminal would obey: escape sequences and control characters other than tab and newline.

    What a worker says (an error, a hint) may hold colours, or what a stranger put into the data that it read.
    """
    return _CONTROL.sub("", _SEQUENCE.sub("", text))


def one_line(text: str, most: int | None = None) -> str:
    """`printable` text on one line, without runs of spaces: what it says cannot pass for a line of ours.

    `most`: characters after which it is cut off, with dots.
    """
    line = " ".join("".join(each if each.isprintable() else " " for each in _SEQUENCE.sub("", text)).split())
    return line if most is None or len(line) <= most else line[:most - 3].rstrip() + "..."
