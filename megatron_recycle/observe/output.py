"""Standard output and error that a full disk does not fail.

`recycle run` sends the output of its workers to files. On a full disk a `print` would raise, and end each worker in
turn for the sake of a line. So lines for a file are dropped while it cannot be written.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
from typing import Any

from megatron_recycle.observe.disk import of_disk


def spare_output() -> None:
    """Replace standard output and error of this process by streams that drop lines if the disk does not take them.

    A stream stays as it is if it is no file, or if the script has replaced it.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and _is_file(stream):
            setattr(sys, name, _spared(stream))


def _spared(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    with contextlib.suppress(OSError):
        stream.flush()
    raw = _Expendable(stream.fileno(), "wb", closefd=False)
    unbuffered = isinstance(stream.buffer, io.RawIOBase)
    buffer: Any = raw if unbuffered else io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors=stream.errors, newline="\n",
                            line_buffering=stream.line_buffering, write_through=unbuffered)


def _is_file(stream: io.TextIOWrapper) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False


class _Expendable(io.FileIO):
    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        try:
            super().write(data)
        except OSError as error:
            if not of_disk(error):
                raise
        return size  # the rest of a cut line is dropped, too
