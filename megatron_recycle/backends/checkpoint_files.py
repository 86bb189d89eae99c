"""A check that files of a checkpoint are present and not truncated, without reading them.

torch writes zip archives, whose table is at their end. Bit rot is not detected.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_recycle.environment import Launched
from megatron_recycle.observe.log import get_logger

Name = TypeVar("Name", int, str)
_ZIP = b"PK"


def unreadable(files: Iterable[str | os.PathLike[str]], sizes: Mapping[str, int] | None = None) -> str | None:
    """The reason why one of ``files`` cannot be read; None if all can. ``sizes``: the least bytes of files."""
    for file in map(Path, files):
        try:
            if (least := (sizes or {}).get(str(file))) is not None:
                if file.stat().st_size < least:
                    return f"{file} has {file.stat().st_size} bytes and should have {least}"
                continue
            with file.open("rb") as opened:
                begin = opened.read(len(_ZIP))
                if begin == _ZIP:
                    zipfile.ZipFile(opened).close()
            if not begin:
                return f"{file} is empty"
        except zipfile.BadZipFile:
            return f"{file} is cut off"
        except OSError as error:
            return f"{file}: {error.strerror or error}"
    return None


def started_again() -> bool:
    """Whether this is another life of the job (`--job-restarts`), whose checkpoint no user has chosen."""
    return Launched.read().by_recycle_run and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def newest_readable(folder: str, names: Sequence[Name], check: Callable[[Name], str | None],
                    device: torch.device | str | int) -> Name | None:
    """The first of ``names`` whose files all ranks can read; None if there is none. All ranks call this together.

    Args:
        folder: of the checkpoints.
        names: the newest first; rank 0's count.
        check: the reason why this rank cannot read a checkpoint's files, or None.
        device: where torch's default group communicates.
    """
    shared = [list(names)]
    dist.broadcast_object_list(shared)
    for number, name in enumerate(shared[0]):
        reason = check(name)
        if reason is not None:
            get_logger().error("megatron-recycle: the checkpoint %s in %s cannot be read: %s", name, folder, reason)
        readable = torch.tensor([int(reason is None)], device=device)
        dist.all_reduce(readable, dist.ReduceOp.MIN)
        if not readable.item():
            continue
        if number and dist.get_rank() == 0:
            get_logger().error(
                "megatron-recycle: the script goes on from the checkpoint %s in %s, since newer ones (%s) cannot be "
                "read; the iterations since then are made again", name, folder, ", ".join(map(str, shared[0][:number])))
        return name
    return None
