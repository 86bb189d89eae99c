"""The coordinator's memory on disk: one JSON line per decision, flushed to the disk before it is announced.

Kept behind two methods and a property (`append`, `records`, `close`), so that a replicated one
can take its place.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_recycle.membership.resume import RESTART


class JournalError(RuntimeError):
    """The journal is missing, taken by another coordinator, or damaged: this coordinator must not lead."""


class JournalInUse(JournalError):
    """Another coordinator of the same job lives."""


class Journal:
    """An append-only file: `create` it for a new job, `reopen` it for a coordinator that comes back."""

    def __init__(self, path: Path, descriptor: int, records: list[dict[str, Any]]) -> None:
        self.path = path
        self.records = records
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Journal:
        """A new journal; an existing file is of another job and is not touched.

        Raises:
            JournalError: the file exists.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
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
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
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
        return cls(path, descriptor, records)

    def append(self, record: Mapping[str, Any]) -> None:
        """Returns when the record is on disk."""
        line = json.dumps(record, separators=(",", ":")) + "\n"
        os.write(self._descriptor, line.encode())
        os.fdatasync(self._descriptor)
        self.records.append(dict(record))

    def close(self) -> None:
        os.close(self._descriptor)


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise JournalInUse(f"{path} is in use: another coordinator of this job lives") from error


def _sync_folder(folder: Path) -> None:
    """The file's name must survive a crash as well."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
