"""Event file of a run: one JSON object per line, and one log line for each.

Every event has `t` (Unix seconds, float) and `event`; most have some of `generation`, `attempt`, `iteration`, `worker`
("d:s"), `kind` (how a worker failed) and `ms` (milliseconds since the failure; see docs/events.md). The coordinator
alone writes the file; any process may read it, also while it grows.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from megatron_recycle.observe.disk import of_disk
from megatron_recycle.observe.log import get_logger
from megatron_recycle.observe.rolling import MOST, roll
from megatron_recycle.observe.text import one_line

VERSION = 1
"""Version of the events' form, in `started` as ``v``. A field that goes away or changes its meaning raises it, a new
one does not."""
KINDS = ("exit", "frozen", "stalled", "unreachable", "slow", "corrupt", "leave", "move", "stranded")
"""Values of `kind`: how a worker failed or left."""

_LIBRARY = re.compile(r"\[[^\]\s]*\.cc:\d+\] |[.] This is typically caused by .*")
"""The source file and the advice in an error of gloo."""
_LEADING = ("generation", "attempt", "iteration", "worker", "kind", "ms")


class EventLog:
    """Appends events to a file and writes one INFO line for each.

    Safe to use from several threads. Each event is one `write` in append mode, so that neither a reader nor the end of
    the process by SIGKILL meets half a line. Close it, or use it as a context manager.

    Events are expendable: if the disk does not take one, it is dropped, with one warning, and the caller goes on.

    Args:
        path: the file, made with its folder if missing; an existing one is continued.
        log: whether to write log lines too.
        most: bytes, after which old ticks move to files of their own (see `rolling`); decisions stay.

    Raises:
        OSError: the file may not be opened, or is a link.
    """

    def __init__(self, path: str | os.PathLike[str], log: bool = True, most: int = MOST) -> None:
        self.path = Path(path)
        self._most = self._next = most
        self._log = get_logger() if log else None
        self._lock = threading.Lock()
        self._closed = False
        self._missing = 0
        self._file: int | None = None
        with self._expendable():
            self._file = self._open()

    def emit(self, event: str, **fields: Any) -> dict[str, Any]:
        """Record `event` now (or at `t`, if given) and return the record.

        Fields that are None are left out; numbers that are not finite are written as text.

        Raises:
            ValueError: the log is closed.
            TypeError: a field is not representable in JSON.
        """
        record = _record(event, fields)
        line = json.dumps(record, allow_nan=False, separators=(", ", ": ")) + "\n"
        with self._lock:
            if self._closed:
                raise ValueError(f"event {event!r} after {self.path} was closed")
            with self._expendable():
                if self._file is None:
                    self._file = self._open()
                _append(self._file, line.encode())
                self._back()
                self._roll()
        if self._log is not None:
            # stacklevel 2: the log line names the caller's file and function, as DeepSpeed's own lines do.
            self._log.info(format_event(record), stacklevel=2)
        return record

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                with self._expendable():  # a network file system may report unwritten data only now
                    os.close(self._file)
                self._file = None

    def _roll(self) -> None:
        """Move old ticks away, if the file has become too large."""
        assert self._file is not None
        if os.fstat(self._file).st_size < self._next:
            return
        self._next = sys.maxsize  # a full disk is asked once
        try:
            size = roll(self.path)
        except OSError as error:
            get_logger().warning("megatron-recycle: %s is large, and old events cannot be moved out of it (%s); it "
                                 "goes on growing", self.path, error.strerror)
            return
        self._next = max(self._most, 2 * size)
        before, self._file = self._file, self._open()
        os.close(before)

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        _end_line(file)
        return file

    @contextmanager
    def _expendable(self) -> Iterator[None]:
        """A block of expendable writes: errors of the disk are counted, and the first one is logged."""
        try:
            yield
        except OSError as error:
            if not of_disk(error):
                raise
            if not self._missing:
                get_logger().warning("megatron-recycle: events cannot be written to %s (%s); they are left out, and "
                                     "training goes on: make room on, or mend, the disk of %s", self.path,
                                     error.strerror, self.path.parent)
            self._missing += 1

    def _back(self) -> None:
        if self._missing:
            get_logger().warning("megatron-recycle: events are written to %s again; %d are missing", self.path,
                                 self._missing)
            self._missing = 0

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def read_events(path: str | os.PathLike[str], skip: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """All events of the file, in order, but for those with one of the texts ``skip`` in their first 80 characters,
    which are not parsed. An unfinished last line is left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: a complete line is not a JSON object; the message names file and line.
    """
    found = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                break
            if skip and any(text in line[:80] for text in skip):
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not an event: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number}: not an event: {line.strip()}")
            found.append(record)
    return found


class EventReader:
    """Reader of a growing event file; each call of `new` continues after the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._last = b""

    def new(self) -> list[dict[str, Any]]:
        """The events since the last call. An unfinished last line is left for the next call. If the file was replaced,
        the rest of the old one comes first.

        Raises:
            OSError, ValueError: it cannot be read; the part that could be read is lost then.
        """
        found: list[dict[str, Any]] = []
        if (file := self._opened()) is None:
            return found
        found += self._rest(file)
        if self._replaced(file):
            found += self._rest(file)
            self.close()
            if (file := self._opened()) is not None:
                found += self._rest(file, after=self._last)
        return found

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _opened(self) -> BinaryIO | None:
        if self._file is None:
            with suppress(FileNotFoundError):
                self._file = self._path.open("rb")
        return self._file

    def _replaced(self, file: BinaryIO) -> bool:
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False

    def _rest(self, file: BinaryIO, after: bytes = b"") -> list[dict[str, Any]]:
        """The unread events; those behind the line ``after``, if it is among them."""
        lines = file.readlines()
        if lines and not lines[-1].endswith(b"\n"):
            file.seek(-len(lines.pop()), os.SEEK_CUR)
        if after in lines:  # old ticks have moved away meanwhile
            lines = lines[lines.index(after) + 1:]
        self._last = lines[-1] if lines else self._last
        return [json.loads(line) for line in lines]


def format_event(record: Mapping[str, Any]) -> str:
    """One line for people: `recycle: suspected generation=1 worker=1:1 kind=exit ms=21.3`.

    Fields that are None or empty lists are left out. Large objects and lists (plans, membership) stay in the file; the
    line shows how many entries they have. Source files of the library are cut from communication errors.
    """
    keys = [key for key in _LEADING if key in record]
    keys += [key for key in record if key not in _LEADING and key not in ("t", "event")]
    keys = [key for key in keys if record[key] is not None and record[key] != []]
    return " ".join([f"recycle: {record['event']}", *(f"{key}={_shown(key, record[key])}" for key in keys)])


def _append(file: int, line: bytes) -> None:
    """Write all of `line` or nothing: a disk that becomes full would take its first part. Raises OSError."""
    start = os.fstat(file).st_size
    try:
        if os.write(file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.ftruncate(file, start)
        raise


def _end_line(file: int) -> None:
    """Drop an unfinished last line, left by a process that could neither finish nor drop it."""
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.ftruncate(file, os.pread(file, size, 0).rfind(b"\n") + 1)


def _record(event: str, fields: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in fields.items() if value is not None and key != "t"}
    leading = {key: kept.pop(key) for key in _LEADING if key in kept}
    moment = fields.get("t")
    record = {"t": time.time() if moment is None else moment, "event": event, **leading, **kept}
    return {key: _plain(value) for key, value in record.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [_plain(item) for item in sorted(value, key=str)]
    return value


def _shown(key: str, value: Any) -> str:
    doing = value.get("doing") if key == "progress" and isinstance(value, dict) else None
    if isinstance(doing, dict) and isinstance(doing.get("what"), str):
        return one_line(f"{doing.get('state')} {doing['what']}")
    if key == "error":
        return one_line(_LIBRARY.sub("", str(value)))
    return _short(value)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and len(value) <= 8 and all(isinstance(item, (str, int)) for item in value):
        return "[" + ",".join(one_line(str(item)) for item in value) + "]"
    if isinstance(value, dict) and len(value) <= 16 and all(item in KINDS for item in value.values()):
        return "[" + ",".join(f"{worker}({kind})" for worker, kind in value.items()) + "]"  # failed workers and how
    if isinstance(value, (dict, list)):
        return f"<{len(value)}>"
    return one_line(str(value))
