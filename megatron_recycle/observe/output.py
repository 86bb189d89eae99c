"""Standard output and error that a full disk does not fail.

`recycle run` writes what its workers print to files. Where the disk of these is full a `print` would raise, and end
each worker in turn for the sake of a line. So what goes to a file is dropped while it cannot be written.
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
    """From now on lines for the standard streams of this process are dropped while the disk does not take them.

    Only where a stream is a file, and was not replaced by somebody else.
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
        return size  # of a line that was cut short the rest is dropped, too
