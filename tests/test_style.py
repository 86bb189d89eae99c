"""The settings in pyproject.toml hold for the whole tree: ruff finds nothing, mypy finds nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TREES = ("megatron_recycle", "scripts", "tests", "setup.py")


def run(tool: str, *arguments: str) -> None:
    pytest.importorskip(tool)
    done = subprocess.run([sys.executable, "-m", tool, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{tool}:\n{done.stdout}{done.stderr}"


def test_ruff_finds_nothing():
    run("ruff", "check", "--output-format", "concise", *TREES)


def test_mypy_finds_nothing():
    run("mypy")


def test_shell_scripts_parse():
    scripts = [*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("scripts/**/*.sbatch"), ROOT / ".ci" / "run"]
    assert len(scripts) >= 3
    bash = shutil.which("bash")
    assert bash is not None
    for script in scripts:
        done = subprocess.run([bash, "-n", str(script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
