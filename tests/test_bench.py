"""Benchmarks that speak the wire's protocol themselves keep up with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_simulated_workers_are_led_and_lost(tmp_path: Path):
    out = tmp_path / "heartbeats.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench" / "heartbeats.py"), "--workers", "96", "--losses", "2",
         "--seconds", "1", "--interval", "0.2", "--iteration", "0.5", "--out", str(out)],
        capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(out.read_text())["losses"]) == 2
