"""Why a checkpoint cannot be written: the disk is named, whoever's error it was."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_recycle.observe import disk as disks
from megatron_recycle.observe.disk import unwritten


def of(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path)


def test_torch_says_nothing_of_a_full_disk_and_all_the_same_it_is_named(disk: Callable[[int], Path]):
    full = disk(2048)
    with (full / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    with pytest.raises(RuntimeError) as error:
        torch.save({"weight": torch.zeros(10_000)}, full / "file.pt")
    assert unwritten(error.value, full / "step9") == (
        f"no space left on {full} (0 of 2 MiB free) while writing checkpoint {full}/step9")


@pytest.mark.parametrize("error", [
    of(errno.ENOSPC), RuntimeError("Worker failure: [Errno 28] No space left on device")])
def test_an_error_of_the_system_is_believed_whatever_there_is_now(error: Exception, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(disks.os, "statvfs", lambda path: SimpleNamespace(
        f_files=10, f_favail=5, f_bavail=2**30, f_blocks=100 * 2**30, f_frsize=1))
    place = tmp_path / "gone" / "step9"
    assert unwritten(error, place) == (
        f"no space left on {disk_of(tmp_path)} (1 of 100 GiB free) while writing checkpoint {place}")
    monkeypatch.setattr(disks.os, "statvfs", lambda path: SimpleNamespace(
        f_files=10, f_favail=0, f_bavail=2**30, f_blocks=100 * 2**30, f_frsize=1))
    assert "(0 of 10 files free)" in str(unwritten(error, place))


def disk_of(folder: Path) -> Path:
    return next(one for one in (folder, *folder.parents) if one.is_mount())


def test_other_errors_of_files_are_named_by_what_the_system_says(tmp_path: Path):
    assert unwritten(of(errno.EROFS), tmp_path / "a") == (
        f"Read-only file system on {disk_of(tmp_path)} while writing checkpoint {tmp_path}/a")
    assert unwritten(of(errno.ENOTDIR, "/x/y"), "/x/a") == "Not a directory: /x/y while writing checkpoint /x/a"
    with pytest.raises(RuntimeError) as error:
        torch.save({}, tmp_path / "gone" / "file.pt")
    assert str(unwritten(error.value, tmp_path / "gone" / "a")).startswith("No such file or directory")
    text = "[enforce fail at inline_container.cc:672] . unexpected pos 832 vs 726"
    assert unwritten(RuntimeError(text), tmp_path / "a") == f"{text} while writing checkpoint {tmp_path}/a", "room now"


def test_what_is_no_error_of_files_is_the_scripts(tmp_path: Path):
    try:
        try:
            raise of(errno.ENOSPC)
        except OSError:
            raise TypeError("cannot pickle this")  # noqa: B904 - as a script may
    except TypeError as error:
        assert unwritten(error, tmp_path) is None
    assert unwritten(RuntimeError("CUDA error"), tmp_path) is None
