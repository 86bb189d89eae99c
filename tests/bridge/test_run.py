"""A script of Megatron-Bridge's users under `recycle run`, unchanged: killed, and back again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.backends import test_megatron_lm as lm
from tests.backends.test_megatron_lm import comes_back, losses
from tests.bridge.test_bridge import pytestmark as _needs
from tests.te import stand_in
from tests.te.versions import newest

__all__ = ["comes_back"]  # a fixture
pytestmark = [*_needs, newest, pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def started_as_users_do(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lm`'s launchers start this script in the place of Megatron-LM's."""
    def start(launcher: Any, folder: Path, arguments: Any, through: Any = ()) -> subprocess.Popen[str]:
        options = json.dumps({"stages": 2, "bf16": False, "folder": str(folder), **json.loads(arguments[0])})
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", *launcher, str(stand_in.__file__), str(engine),
             str(ROOT / "tests" / "bridge" / "script.py"), options],
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    monkeypatch.setattr(lm, "start", start)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_kill_leaves_the_numbers_of_torchrun(engine, tmp_path):
    options = json.dumps({"iterations": 6})
    expected = losses(lm.stock(tmp_path, options))
    assert {*"123456"} < {*expected}
    printed = lm.recycled(tmp_path / "run", tmp_path, options, kill=("1:1", 2))
    found = losses(printed)
    assert {*expected} - {*found} <= lm.UNWRITTEN
    for key in found:
        assert found[key] == pytest.approx(expected[key], rel=1e-4), key
    assert "| live: 3/4 | rerouted: 4 |" in printed


def test_a_killed_worker_is_started_again_and_comes_back(engine, tmp_path, comes_back):
    printed = lm.come_back(tmp_path / "run", tmp_path, "1:1", 2, json.dumps({"iterations": 100_000}), processes=4,
                           forever=())
    assert "| live: 3/4 |" in printed and "| live: 4/4 |" in printed


def test_it_ends_where_the_recipe_says_with_a_checkpoint_and_a_worker_missing(engine, tmp_path):
    """`exit_interval`: as with torchrun all end well there, whoever is left."""
    options = {"iterations": 1000, "train__exit_interval": 5}
    lm.stock(tmp_path, json.dumps({**options, "checkpoint__save": str(tmp_path / "stock")}))
    saves = {**options, "checkpoint__save": str(tmp_path / "ours")}
    printed = lm.recycled(tmp_path / "run", tmp_path, json.dumps(saves), kill=("1:1", 2))
    assert "| live: 3/4 |" in printed and "exiting program at iteration 5" in printed
    told = {key for key in losses(printed) if key.isdigit()}
    assert told | {"3"} == {*"12345"}
    for folder in ("stock", "ours"):
        assert (tmp_path / folder / "latest_checkpointed_iteration.txt").read_text() == "5"
