"""GPUs that processes see, and the GPU of each rank's process: hosts write them into the run's folder for `recycle
status`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

FOLDER = "devices"


def visible(environ: Mapping[str, str]) -> list[str] | None:
    """The devices that CUDA_VISIBLE_DEVICES names; None: it is not set, and all are visible."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else [name.strip() for name in named.split(",") if name.strip()]


def write(run_dir: Path, node: str, gpus: Mapping[int, str]) -> None:
    """Write the GPUs of a host's ranks, if it has any and the disk takes it."""
    if not gpus:
        return
    with contextlib.suppress(OSError):
        folder = run_dir / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        new = folder / f".{node}"
        new.write_text(json.dumps({str(rank): gpu for rank, gpu in gpus.items()}) + "\n", encoding="utf-8")
        new.replace(folder / f"{node}.json")


def read(run_dir: Path) -> dict[int, str]:
    """The GPU of each rank, as far as known."""
    found: dict[int, str] = {}
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found |= {int(rank): str(gpu) for rank, gpu in json.loads(path.read_text(encoding="utf-8")).items()}
    return found
