"""The one JSON file that the parts of `check.sh` write, each under its own name, and what machine they ran on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).resolve().parents[2]


def machine() -> dict[str, Any]:
    """What a reader must know to compare figures; the GPU is None where there is none."""
    gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name(0) if gpu else None,
        "gpu_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,  # type: ignore[attr-defined]
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        "torch": torch.__version__, "python": platform.python_version(), "commit": _said("git", "rev-parse", "HEAD"),
        "processors": os.cpu_count(), "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def _said(*command: str) -> str | None:
    """The first line that a command says; None if there is no such command, or it fails."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=_ROOT, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None


def write(path: Path | None, part: str, results: Any) -> None:
    """Put the results of ``part`` into the report, in place of earlier ones; other parts' stay. None: no report."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    report = json.loads(path.read_text()) if path.exists() else {}
    report[part] = {"machine": machine(), "results": results}
    other = path.with_suffix(".new")
    other.write_text(json.dumps(report, indent=2) + "\n")
    other.replace(path)
