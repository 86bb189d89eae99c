"""What the documentation says of versions is what tests have seen."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_recycle.backends.deepspeed import version as deepspeed
from megatron_recycle.backends.deepspeed.version import is_supported
from megatron_recycle.backends.megatron.version import TESTED
from tests.backends.stories import OF_MEGATRON, RESULTS, STORIES, Recorder, of, passed_with, path_of, table, versions

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [name for stories in STORIES.values() for name in stories.values()])
def test_each_story_has_a_test(name):
    file, _, function = path_of(name).partition("::")
    assert f"def {function.partition('[')[0]}(" in (ROOT / file).read_text()


def test_the_tables_are_what_the_tests_have_seen_on_one_commit():
    found = json.loads(RESULTS.read_text())
    page = (ROOT / "docs" / "versions.md").read_text()
    for framework in STORIES:
        assert table(framework, found["runs"]) in page, "paste the output of python -m tests.backends.stories table"
    assert re.fullmatch("[0-9a-f]{12}", found["commit"]), "results of a tree with changes"
    assert f"commit `{found['commit']}`" in page


def test_what_is_declared_as_tested_was():
    runs = json.loads(RESULTS.read_text())["runs"]
    megatron = [run for run in runs if any(of("megatron", story) in run["stories"] for story in OF_MEGATRON)]
    others = [run for run in runs if run not in megatron or of("deepspeed", "killed") in run["stories"]]
    assert passed_with("megatron-core", megatron) == [*TESTED.values()]
    releases = passed_with("deepspeed", others)
    assert releases[0] == ".".join(map(str, deepspeed.OLDEST)) and releases[-1] == deepspeed.TESTED
    assert all(map(is_supported, releases))
    torch = passed_with("torch", runs)
    page = (ROOT / "docs" / "versions.md").read_text()
    for versions_of, row in ((torch, "torch"), (releases, "DeepSpeed")):
        assert re.search(rf"^\| {row} \|.*\| {', '.join(versions_of)} \|$", page, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.night
@pytest.mark.parametrize("version", [one for number, one in TESTED.items() if number != min(TESTED)])
def test_another_core_trains_through_a_failure_in_an_environment_of_its_own(version, tmp_path):
    """Made by scripts/setup.sh where it is not there: one that borrows all else from this one, in seconds."""
    if not (ROOT / ".venv").exists():
        pytest.skip("there is no .venv to borrow from: scripts/setup.sh")
    found = tmp_path / "found.json"
    environment = {**os.environ, "PROCESSES": "0", "VENV": f".venv-core-{version}-borrowing", "PYTEST_ADDOPTS": "",
                   "BORROW": "yes"}
    subprocess.run(["scripts/test.sh", "--core", version, "--stories", str(found), "-k",
                    "megatron_recovery and killed"], cwd=ROOT, env=environment, check=True, timeout=1700)
    (run,) = json.loads(found.read_text())["runs"]
    assert (run["megatron-core"], run["stories"]) == (version, {"megatron: killed": "passed"})


def test_a_story_has_failed_if_one_of_its_tests_has_and_results_of_another_commit_go(tmp_path):
    path, name = tmp_path / "found.json", OF_MEGATRON["lent layers"]
    path.write_text(json.dumps({"commit": "before", "runs": [{**versions(), "stories": {"megatron: old": "passed"}}]}))
    recorder = Recorder(path, "now")
    for number, (when, outcome) in enumerate([("call", "passed"), ("setup", "failed"), ("call", "passed")]):
        recorder.pytest_runtest_logreport(SimpleNamespace(
            nodeid=f"{path_of(name)}[{number}]", when=when, passed=outcome == "passed", failed=outcome == "failed"))
    recorder.pytest_runtest_logreport(SimpleNamespace(
        nodeid=path_of(OF_MEGATRON["killed"]), when="call", passed=True, failed=False))
    recorder.pytest_sessionfinish()
    found = json.loads(path.read_text())
    assert found == {"commit": "now", "runs": [
        {**versions(), "stories": {"megatron: lent layers": "failed", "megatron: killed": "passed"}}]}
    printed = table("megatron", found["runs"])
    assert "| killed | passed |" in printed and "| comes back | not run |" in printed
    assert passed_with("torch", found["runs"]) == []
    later = Recorder(path, "now")
    later.pytest_runtest_logreport(SimpleNamespace(
        nodeid=path_of(OF_MEGATRON["comes back"]), when="call", passed=True, failed=False))
    later.pytest_sessionfinish()
    assert len(json.loads(path.read_text())["runs"][0]["stories"]) == 3
