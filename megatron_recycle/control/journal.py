"""The coordinator's journal on disk: one JSON line per decision, flushed to the disk before it is announced.

Kept behind three methods and a property (`append`, `note`, `close`, `records`), so that a replicated one can take its
place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_recycle.membership.resume import RESTART

_RESERVE = 1 << 20
"""Bytes of disk reserved for the next records, where the file system supports that."""
_NOTE = 80
"""Bytes of a note's line, which is overwritten each time."""
_KEEP_SIZE = 1
_FALLOCATE = ctypes.CDLL(None, use_errno=True).fallocate
_FALLOCATE.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class JournalError(RuntimeError):
    """The journal is missing, taken by another coordinator, or damaged: this coordinator must not lead."""


class JournalInUse(JournalError):
    """Another coordinator of the same job lives."""


class Journal:
    """A file that only grows: `create` it for a new job, `reopen` it after a coordinator restart.

    Disk space for the next records is reserved ahead, so that a disk filled by others does not end the job. Not every
    file system supports that (NFS does not).
    """

    def __init__(self, path: Path, descriptor: int, records: list[dict[str, Any]], end: int = 0) -> None:
        self.path = path
        self.records = records
        """All decisions, in order, and the latest notes."""
        self._descriptor = descriptor
        self._end = end
        self._note: int | None = None  # offset of the last line, if it is a note
        self._reserved = 0
        self._reserve()

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Journal:
        """A new journal; an existing file belongs to another job and is not touched.

        Raises:
            JournalError: the file exists.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise JournalError(f"{path} exists: it is of another job; choose another --run-dir") from error
        _lock(path, descriptor)
        _sync_folder(path.parent)
        return cls(path, descriptor, [])

    @classmethod
    def reopen(cls, path: str | os.PathLike[str]) -> Journal:
        """The journal of a job whose coordinator has died. A last line cut short was never announced and is
        dropped.

        Raises:
            JournalInUse: another coordinator lives.
            JournalError: no such file, or a line that is not the last is damaged.
        """
        path = Path(path)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise JournalError(
                f"{path} is missing: without it a coordinator cannot know which generations were decided and "
                f"refuses to lead. {RESTART}"
            ) from error
        except OSError as error:
            why = "is a link" if error.errno == errno.ELOOP else f"cannot be opened ({error.strerror})"
            raise JournalError(f"{path} {why}: a coordinator refuses to lead by it. {RESTART}") from error
        _lock(path, descriptor)
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(descriptor, whole)
        try:
            records = [json.loads(line) for line in data[:whole].splitlines()]
        except ValueError as error:
            os.close(descriptor)
            raise JournalError(f"{path} is damaged ({error}). {RESTART}") from error
        return cls(path, descriptor, records, whole)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record to the disk, and wait for it. Raises OSError if that fails; then it is not in the file."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            _write(self._descriptor, line, self._end)
            os.fdatasync(self._descriptor)
        except OSError:
            self._cut()
            raise
        self._end += len(line)
        self._note = None
        self.records.append(dict(record))
        self._reserve()

    def note(self, record: Mapping[str, Any]) -> None:
        """Keep the latest of frequent changes, in place of the note before. It survives the end of this process, not of
        this machine. Raises OSError as `append` does."""
        line = json.dumps(record, separators=(",", ":")).encode().ljust(_NOTE - 1) + b"\n"
        at = self._end if self._note is None else self._note
        try:
            _write(self._descriptor, line, at)
        except OSError:
            self._cut()
            raise
        if self._note is None:
            self._note, self._end = at, at + len(line)
            self.records.append({})
        self.records[-1] = dict(record)

    def _cut(self) -> None:
        """Drop the written part of a line. If even that fails, it stays as half a last line, as after a crash."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self._end)
        self._reserved = 0

    def _reserve(self) -> None:
        """Reserve disk space. Without it the disk may be full at the next write, which then fails."""
        if self._end + _RESERVE // 2 < self._reserved:
            return
        if not _FALLOCATE(self._descriptor, _KEEP_SIZE, self._end, _RESERVE):
            self._reserved = self._end + _RESERVE

    def close(self) -> None:
        os.close(self._descriptor)


def _write(descriptor: int, line: bytes, at: int) -> None:
    """Write all of it: a disk that becomes full takes the first part of a line without an error."""
    while line:
        written = os.pwrite(descriptor, line, at)
        line, at = line[written:], at + written


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise JournalInUse(f"{path} is in use: another coordinator of this job lives") from error


def _sync_folder(folder: Path) -> None:
    """Flush the folder: the file's name must survive a crash as well."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
