"""RUN_DIR/post-mortem: an engineer's evidence of a failed job, in one folder.

Every live worker writes its threads' stacks when it hears of the end (`observe.stacks`). Once all have ended, each
host's launcher adds the content of the run's folder: events, the journal, plans, the ends of all logs, and software
versions.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from megatron_recycle.membership.protocol import End
from megatron_recycle.observe.stacks import FOLDER

_WHOLE = ("journal.jsonl", "events.jsonl", "chaos.jsonl")
_LOGS = ("worker-*.log", "coordinator.log", "store.log", "chaos.log")
_MOST = 4 * 2**20
"""Bytes kept of each file, the last ones."""
_PACKAGES = ("megatron-recycle", "torch", "deepspeed", "megatron-core", "numpy", "ortools")
_SHOWN = ("RECYCLE_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "CUDA_VISIBLE", "SLURM_JOB", "SLURM_NODE")
_HIDDEN = "TOKEN"


def collect(run_dir: Path, end: End, environ: Mapping[str, str], host: str) -> Path | None:
    """Gather the files; returns the folder, or None where the disk does not take them: a job's end is not held up for
    its post-mortem.

    Args:
        end: status and message.
        environ: of the workers; tokens are left out.
        host: this one's name, where several write to one folder.
    """
    folder = run_dir / FOLDER
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        for pattern in (*_WHOLE, *_LOGS):
            for path in run_dir.glob(pattern):
                _copy_end(path, folder / path.name)
        if (run_dir / "plans").is_dir():
            shutil.copytree(run_dir / "plans", folder / "plans", dirs_exist_ok=True)
        summary = {"status": end.status, "message": end.message, "host": host, "versions": _versions(),
                   "environment": {name: text for name, text in sorted(environ.items())
                                   if name.startswith(_SHOWN) and _HIDDEN not in name}}
        (folder / f"about-{host.replace('/', '-')}.json").write_text(json.dumps(summary, indent=1) + "\n")
    except OSError:
        return None
    return folder


def _copy_end(path: Path, to: Path) -> None:
    if path.is_symlink():
        return
    with path.open("rb") as source, to.open("wb") as target:
        source.seek(max(0, os.fstat(source.fileno()).st_size - _MOST))
        shutil.copyfileobj(source, target)


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
