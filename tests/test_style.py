"""The settings in pyproject.toml hold for the whole tree; scripts/test.sh looks for that beside the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_style():
    for tool in ("ruff", "mypy"):
        pytest.importorskip(tool)
    done = subprocess.run([str(ROOT / "scripts" / "style.sh")], capture_output=True, text=True,
                          env={**os.environ, "VENV": str(Path(sys.executable).parents[1])})
    assert done.returncode == 0, done.stdout + done.stderr
