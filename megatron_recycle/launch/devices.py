"""Which GPU each rank's process has: hosts write it into the run's folder, `recycle status` reads it there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

FOLDER = "devices"


def write(run_dir: Path, node: str, gpus: Mapping[int, str]) -> None:
    """Write the GPUs of a host's ranks, if it has some and the disk takes it."""
    if not gpus:
        return
    with contextlib.suppress(OSError):
        folder = run_dir / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        new = folder / f".{node}"
        new.write_text(json.dumps({str(rank): gpu for rank, gpu in gpus.items()}) + "\n", encoding="utf-8")
        new.replace(folder / f"{node}.json")


def read(run_dir: Path) -> dict[int, str]:
    """The GPU of each rank, as far as that is known."""
    found: dict[int, str] = {}
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found |= {int(rank): str(gpu) for rank, gpu in json.loads(path.read_text(encoding="utf-8")).items()}
    return found
