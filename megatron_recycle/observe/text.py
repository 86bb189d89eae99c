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


def one_line(text: str) -> str:
    """`printable` text on one line, without runs of spaces: what it says cannot pass for a line of ours."""
    return " ".join("".join(each if each.isprintable() else " " for each in _SEQUENCE.sub("", text)).split())
