"""Standard output and error that do not fail, or hold up, the process behind them.

`recycle run` sends the output of its workers to files. On a full disk a `print` would raise, and end each worker in
turn for the sake of a line. So lines for a file are dropped while it cannot be written.

The launcher's own output goes wherever its user wants it: into a pipe whose reader ends (`recycle run | head`), to a
terminal that goes away (`nohup`, a cut connection), or to a reader that stops reading (Ctrl-S, `less`). The job depends
on none of them.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
from collections.abc import Callable
from typing import Any

from megatron_recycle.observe.disk import of_disk

_PATIENCE_MS = 1000
"""How long one line waits for a reader that is behind; the next ones do not wait until it reads again."""
_GAP = b"\n[recycle: output is left out here, since it was not read]\n"


def spare_output() -> None:
    """Replace standard output and error of this process by streams that drop lines if the disk does not take them.

    A stream stays as it is if it is no file, or if the script has replaced it.
    """
    _replace(lambda stream: _spared(stream, _Expendable(stream.fileno(), "wb", closefd=False), stream.errors)
             if stat.S_ISREG(os.fstat(stream.fileno()).st_mode) else stream)


def detach_output() -> None:
    """Replace standard output and error of this process, a launcher, by streams that drop all that cannot be written:
    the disk does not take it, its reader has gone, or does not read. No character is without a form."""
    _replace(lambda stream: _spared(stream, _Detached(_own(stream.fileno()), "wb", closefd=False), "backslashreplace"))


def _replace(new: Callable[[io.TextIOWrapper], io.TextIOWrapper]) -> None:
    """Put a stream's replacement in its place, unless it is no longer Python's own, or has no descriptor."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            with contextlib.suppress(OSError, ValueError):
                setattr(sys, name, new(stream))


def _spared(stream: io.TextIOWrapper, raw: io.FileIO, errors: str | None) -> io.TextIOWrapper:
    with contextlib.suppress(OSError):
        stream.flush()
    unbuffered = isinstance(stream.buffer, io.RawIOBase)
    buffer: Any = raw if unbuffered else io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors=errors, newline="\n",
                            line_buffering=stream.line_buffering, write_through=unbuffered)


def _own(descriptor: int) -> int:
    """A descriptor for the same pipe or terminal that never blocks. The given one, which others share, stays as it is;
    it is returned for a file, whose offset they share, and where there can be no other."""
    if not stat.S_ISFIFO(mode := os.fstat(descriptor).st_mode) and not stat.S_ISCHR(mode):
        return descriptor
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return descriptor


class _Expendable(io.FileIO):
    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        try:
            super().write(data)
        except OSError as error:
            if not of_disk(error):
                raise
        return size  # the rest of a cut line is dropped, too


class _Detached(io.FileIO):
    _behind = False
    """Whether the reader did not read when something was last written."""

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        rest = memoryview(_GAP + bytes(data) if self._behind else data).cast("B")
        with contextlib.suppress(OSError):
            while rest and (written := self._part(rest[:select.PIPE_BUF])):
                rest = rest[written:]
        return size

    def _part(self, data: memoryview) -> int:
        """Write a part of so few bytes, which a pipe takes whole or not at all. Returns their number, 0 if the reader
        is behind."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        ready = poll.poll(0 if self._behind else _PATIENCE_MS)
        written = super().write(data) if ready else None  # of a terminal, None even if it seemed to be ready
        self._behind = written is None
        return written or 0
