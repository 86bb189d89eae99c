"""The quickstart: the real script end to end, and its comparison, which must be able to fail."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
KEYS = {
    "grid", "iterations", "final_loss", "final_loss_fault_free", "first_validation_loss", "final_validation_loss",
    "bitwise_equal", "max_abs_difference", "lost_iterations", "redone_actions", "failures",
}  # fmt: skip
FAILURE_KEYS = {"worker", "kind", "iteration", "detected_ms", "resumed_ms", "plan_source", "plan_ms"}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def quickstart() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPTS / "quickstart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPTS))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_two_workers_are_killed_and_the_result_is_that_of_the_run_without_failures(tmp_path: Path):
    text = SCRIPTS.parent / "megatron_recycle" / "membership"
    command = [sys.executable, str(SCRIPTS / "quickstart.py"), "--iterations", "6", "--pipelines", "2"]
    command += ["--data", str(text)]
    command += ["--output", str(tmp_path / "out"), "--limit", "180"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=390)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("quickstart: 2 of 4 workers killed")

    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report.keys() >= KEYS
    assert report["bitwise_equal"] and report["max_abs_difference"] == 0.0
    assert report["final_loss"] == report["final_loss_fault_free"]
    assert report["final_validation_loss"] < report["first_validation_loss"]
    assert report["lost_iterations"] == 0 and report["redone_actions"] == 0
    assert [failure["worker"] for failure in report["failures"]] == ["1:1", "0:0"]
    for failure in report["failures"]:
        assert failure.keys() >= FAILURE_KEYS
        assert 0 < failure["detected_ms"] < failure["resumed_ms"]
    assert (tmp_path / "out/timeline.png").read_bytes().startswith(PNG)
    assert (tmp_path / "out/events.jsonl").exists()
    assert len(list((tmp_path / "out").glob("worker-*.log"))) == 4
    assert not _processes_of(tmp_path)


@pytest.mark.parametrize("group", ["parameters", "optimizer", "losses"])
def test_one_bit_in_one_survivor_is_found(quickstart: ModuleType, tmp_path: Path, group: str):
    runs = []
    for name in ("one", "other"):
        folder = tmp_path / name
        (folder / "state").mkdir(parents=True)
        for pipeline in range(3):
            for stage in range(2):
                weight = torch.full((4, 4), 0.1 + pipeline + stage)
                adam = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": weight / 7}}, "param_groups": [{"lr": 0.1}]}
                dump = {"parameters": {"weight": weight}, "optimizer": adam, "losses": [3.0, 2.0]}
                torch.save(dump, folder / f"state/worker-{pipeline}-{stage}.pt")
        kills = [quickstart.Kill("1:1", 1, 0.5), quickstart.Kill("0:0", 2, 0.5)] if name == "one" else []
        events = [{"event": "committed", "iteration": k, "loss": 3.0 - k} for k in range(2)]
        runs.append(quickstart.Outcome(folder, kills, events))
    whole = quickstart.compare(*runs, 3)
    assert all(whole.equal.values()) and whole.max_abs_difference == 0.0 and set(whole.equal) == {
        "parameters", "optimizer state", "losses"
    }  # fmt: skip

    for worker, survives in (("1-1", False), ("2-1", True)):
        path = tmp_path / "one/state" / f"worker-{worker}.pt"
        dump = torch.load(path, weights_only=True)
        if group == "losses":
            dump["losses"][1] = 2.0000000000000004
        else:
            tensor = dump["parameters"]["weight"] if group == "parameters" else dump["optimizer"]["state"][0]["exp_avg"]
            tensor.view(torch.int32)[3, 3] ^= 1
        torch.save(dump, path)
        found = quickstart.compare(*runs, 3)
        assert all(found.equal.values()) != survives
        assert (found.max_abs_difference > 0) == survives


def test_a_zero_of_the_other_sign_is_not_the_same_bits(quickstart: ModuleType):
    comparison = quickstart.Comparison()
    comparison.add("parameters", torch.tensor([0.0]), torch.tensor([-0.0]))
    assert comparison.equal == {"parameters": False}


def test_a_lost_iteration_or_a_loss_that_did_not_fall_is_not_good(quickstart: ModuleType):
    good = {"bitwise_equal": True, "lost_iterations": 0, "first_validation_loss": 5.0, "final_validation_loss": 3.0}
    assert quickstart.is_good(good)
    for change in ({"bitwise_equal": False}, {"lost_iterations": 1}, {"final_validation_loss": 5.0}):
        assert not quickstart.is_good({**good, **change})


def _processes_of(folder: Path) -> list[str]:
    """Processes that name this folder in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        if entry.name.isdigit() and str(folder).encode() in command and entry.name != str(os.getpid()):
            found.append(f"{entry.name}: {command.decode(errors='replace')}")
    return found


def test_a_text_that_is_not_there_is_told_before_anything_starts(
    quickstart: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["quickstart", "--data", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit):
        quickstart.main()
    assert "there is no" in capsys.readouterr().err
