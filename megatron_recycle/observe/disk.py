"""Whole files, and disk errors, told from other errors so that a writer can name the disk and go on without it."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from pathlib import Path

_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE})
_OF_TORCH = ("inline_container", "PytorchStreamWriter", "Parent directory")
"""Words of torch's file writer, whose errors do not name the system's error."""
_NUMBER = re.compile(r"\[Errno (\d+)\]")
_PROBE = 2**20
"""Bytes."""


def of_disk(error: OSError) -> bool:
    """Whether the disk is full, broken or read-only; not a link, a missing right, a closed pipe."""
    return error.errno in _ERRORS


def write_whole(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file that its readers find whole, or as it was before. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)


def unwritten(error: BaseException, place: str | os.PathLike[str]) -> str | None:
    """Why the checkpoint at ``place`` cannot be written, with its disk, where ``error`` comes from writing files; None
    for other errors."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError) and not _of_writer(cause):
        cause = cause.__cause__
    if cause is None:
        return None
    found = cause if isinstance(cause, OSError) else _quoted(str(cause)) or _probed(Path(place).parent)
    return f"{_why(found, Path(place).parent) if found is not None else cause} while writing checkpoint {place}"


def _of_writer(error: BaseException) -> bool:
    """Whether the error is from a file writer that hides the system's error."""
    text = str(error)
    return isinstance(error, RuntimeError) and (_quoted(text) is not None or any(words in text for words in _OF_TORCH))


def _quoted(text: str) -> OSError | None:
    """The system's error quoted in another error's text, as in reports of Megatron's writers in other processes."""
    found = _NUMBER.search(text)
    return None if found is None else OSError(int(found[1]), os.strerror(int(found[1])))


def _probed(folder: Path) -> OSError | None:
    """The error of a test file in ``folder``; None if it can be written."""
    try:
        if os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < _PROBE:  # a small file may fit all the same
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def _why(error: OSError, folder: Path) -> str:
    """The system's message, with the disk of ``folder``."""
    text = error.strerror or str(error)
    if not of_disk(error):
        return f"{text}: {error.filename}" if error.filename else text
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    disk = next((one for one in (folder.absolute(), *folder.absolute().parents) if one.is_mount()), folder)
    try:
        now = os.statvfs(folder)
    except OSError:
        now = None
    if now is None or error.errno != errno.ENOSPC:
        return f"{text} on {disk}"
    if now.f_files and not now.f_favail:
        return f"no space left on {disk} (0 of {now.f_files} files free)"
    free, total = now.f_bavail * now.f_frsize, now.f_blocks * now.f_frsize
    name, unit = ("GiB", 2**30) if total >= 2**30 else ("MiB", 2**20)
    return f"no space left on {disk} ({free / unit:.3g} of {total / unit:.3g} {name} free)"
