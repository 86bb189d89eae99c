"""Standard input, output and error of a process that was started without some of them, as daemons often are."""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Open /dev/null on those of the descriptors 0 to 2 that are closed.

    Otherwise the next file or socket gets the number: prints would go into that file, and a child that inherits it
    would lose it to a standard stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
