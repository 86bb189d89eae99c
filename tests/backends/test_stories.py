"""What the documentation says of versions is what tests have seen."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_recycle.backends.megatron.private import TESTED
from tests.backends.stories import FOLDER, RESULTS, STORIES, Recorder, table

ROOT = Path(__file__).resolve().parents[2]


def test_each_story_has_a_test():
    for name in STORIES.values():
        file, _, function = name.partition("::")
        assert f"def {function.partition('[')[0]}(" in (ROOT / FOLDER / file).read_text()


def test_the_table_is_what_the_tests_have_seen():
    found = json.loads(RESULTS.read_text())
    assert {*found} == {*TESTED.values()}
    assert all(re.match(r"\d+\.\d+", one["torch"]) for one in found.values())
    assert table(found) in (ROOT / "docs" / "versions.md").read_text(), (
        "paste the output of python -m tests.backends.stories table")


@pytest.mark.night
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", [one for one in TESTED.values() if one != TESTED[0, 16]])
def test_another_core_trains_through_a_failure_in_an_environment_of_its_own(version, tmp_path):
    """Made by scripts/setup.sh where it is not there; by day the suite has the oldest alone."""
    found = tmp_path / "found.json"
    environment = {**os.environ, "PROCESSES": "1", "VENV": "", "PYTEST_ADDOPTS": ""}
    subprocess.run(["scripts/test.sh", "--core", version, "--stories", str(found), "-k", "killed_in_mid_iteration"],
                   cwd=ROOT, env=environment, check=True, timeout=1700)
    (of_this,) = json.loads(found.read_text()).values()
    assert of_this["stories"] == {"killed": "passed"}


def test_a_story_has_failed_if_one_of_its_tests_has(tmp_path):
    path, name = tmp_path / "found.json", STORIES["lent layers"]
    recorder = Recorder(path)
    for number, (when, outcome) in enumerate([("call", "passed"), ("setup", "failed"), ("call", "passed")]):
        recorder.pytest_runtest_logreport(SimpleNamespace(
            nodeid=f"{FOLDER}/{name}[{number}]", when=when, passed=outcome == "passed", failed=outcome == "failed"))
    recorder.pytest_runtest_logreport(SimpleNamespace(
        nodeid=f"{FOLDER}/{STORIES['killed']}", when="call", passed=True, failed=False))
    recorder.pytest_sessionfinish()
    (of_this,) = json.loads(path.read_text()).values()
    assert of_this["stories"] == {"lent layers": "failed", "killed": "passed"}
    assert "| killed | passed |" in table({"0.0": of_this}) and "| comes back | not run |" in table({"0.0": of_this})
