"""`recycle simulate` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_recycle.cli import main
from megatron_recycle.plan import Costs, PlanError
from megatron_recycle.tools.simulate.job import profiled
from megatron_recycle.tools.simulate.model_costs import Machine, Model, costs
from megatron_recycle.tools.simulate.policies.recycling import Stalls
from megatron_recycle.tools.simulate.report import Estimate
from megatron_recycle.tools.simulate.trace import TraceError

GRID = ["--grid", "3x2x4", "--gpus", "1", "--quick"]


def called(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["simulate", *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_made_up_trace_beside_other_policies(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    status, out, _ = called(capsys, *GRID, "--host-mtbf", "3", "--hours", "2", "--seeds", "3", "--repair", "0.5",
                            "--policy", "ours", "bamboo", "fault-scaled", "--json", "-",
                            "--picture", str(tmp_path / "picture.png"), "--write-trace", str(tmp_path / "trace"))
    told = json.loads(out)
    assert status == 0 and (tmp_path / "picture.png").stat().st_size > 5000
    assert [policy["policy"] for policy in told["policies"]] == ["ours", "bamboo", "fault-scaled"]
    ours, bamboo, scaled = told["policies"]
    assert len(ours["outcomes"]) == 3 and ours["of_fault_free_ci95"] > 0
    assert ours["of_fault_free"] > bamboo["of_fault_free"] and scaled["of_fault_scaled"] == pytest.approx(1.0)
    again, out, err = called(capsys, *GRID, "--trace", str(tmp_path / "trace"), "--policy", "ours", "--json", "-")
    same, before = (one["policies"][0]["outcomes"][0] for one in (json.loads(out), told))
    assert again == 0 and not err
    assert {**same, "cpu_seconds": 0, "plans": 0} == {**before, "cpu_seconds": 0, "plans": 0}


def test_the_table_names_the_policies(capsys: pytest.CaptureFixture[str]):
    status, out, err = called(capsys, *GRID, "--hours", "0.1", "--policy", "ours", "fault-free", "--model", "4,64,32")
    assert status == 0 and "ours" in out and "fault-free" in out
    assert "nothing fails: give --trace" in err
    _, _, err = called(capsys, *GRID, "--hours", "0.1", "--host-mtbf", "1e9", "--policy", "fault-free")
    assert "with --host-mtbf 1e+09 nothing has failed in 0.1 hours: give more --hours" in err


def test_outages_of_a_trace_and_losses_of_a_job_are_told_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Two machines that go at once are one loss; and when the job begins is said."""
    path = tmp_path / "trace"
    path.write_text("".join(f"{at},{what},m{number}\n" for at, what, number in (
        *((0, "add", number) for number in range(5)), (60_000, "add", 5), (600_000, "remove", 1),
        (600_000, "remove", 2), (3_600_000, "add", 6))))
    _, out, err = called(capsys, *GRID, "--trace", str(path), "--policy", "ours", "drop", "fault-scaled")
    assert "2 outages in the trace" in out and "losses survived" in out and "1 of 1" in out
    assert "ours, drop: begins with the whole grid after 60 s" in err
    assert "7 machines, at most 6 at a time, and the cluster 6 hosts" in err
    _, out, err = called(capsys, *GRID, "--trace", str(path), "--policy", "ours", "--wait", "30", "--json", "-")
    told = json.loads(out)
    assert told["about"]["outages"] == [2] and told["about"]["notes"][-1] == (
        "ours: begins with 2 of 3 pipelines, on 5 of 6 workers after 30 s")


@pytest.mark.parametrize(("words", "said"), [
    (["--grid", "3x2"], "PIPELINESxSTAGESxMICROBATCHES"),
    (["--grid", "0x2x4"], "at least 1"),
    ([*GRID, "--policy", "hope"], "no policy 'hope'"),
    ([*GRID, "--trace", "nowhere"], "nowhere"),
    ([*GRID, "--trace", "nowhere", "--gpu-mtbf", "5"], "not both"),
    ([*GRID, "--costs", "1,2"], "F,B,W"),
    ([*GRID, "--costs", "1,2,3", "--model", "gpt3-medium"], "one of"),
    ([*GRID, "--model", "2,64,x"], "gpt3-medium"),
    (["--grid", "3x4x4", "--gpus", "1", "--model", "2,64"], "2 layers"),
    ([*GRID, "--hosts", "4"], "has 4"),
    ([*GRID, "--hosts", "0"], "needs hosts"),
    ([*GRID, "--tp", "2"], "multiple of 2"),
    ([*GRID, "--host-mtbf", "0"], "above 0"),
    ([*GRID, "--cap", "0"], "at least one"),
])
def test_what_makes_no_sense_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str):
    status, out, err = called(capsys, *words)
    assert status == 2 and not out and err.count("\n") == 1 and said in err


def test_costs_of_a_real_run_are_its_last_profile(tmp_path: Path):
    first, last = Costs.uniform(2, 1, 2, 3), Costs.uniform(2, 4, 5, 6, 7, 8)
    path = tmp_path / "events.jsonl"
    events = [{"event": "started"}, {"event": "profiled", "costs": first.to_json()},
              {"event": "profiled", "costs": {**last.to_json(), "speed": {"0:1": 1.5}}}]
    path.write_text("\n".join(map(json.dumps, events)) + '\n{"event": "comm')  # it is just being written
    assert profiled(path) == last
    path.write_text("\n".join(map(json.dumps, [*events, {"event": "spent", "costs": first.to_json()}])) + "\n")
    assert profiled(path) == first, "told later"
    path.write_text(json.dumps({"event": "started"}) + "\n" + json.dumps({"event": "committed"}) + "\n")
    with pytest.raises(TraceError, match="profiled"):
        profiled(path)
    path.write_text("{\n" + json.dumps(events[1]) + "\n")
    with pytest.raises(TraceError, match="line 1"):
        profiled(path)


def test_costs_follow_the_stated_formula():
    model, machine = Model(4, 1000, 100, 2, 5000), Machine(tflops=100, tp_gbps=100, net_gbps=10, memory_gbps=1000)
    found, copy = costs(model, machine, pipelines=2, stages=2)
    tokens, layers = 200, 2
    forward = layers * (24 * tokens * 1000 ** 2 + 4 * tokens * 100 * 1000)
    assert found.forward[0] == round(forward / 100e6)
    assert found.forward[1] == round((forward + 2 * tokens * 1000 * 5000) / 100e6)
    assert found.backward_weight[0] == round(layers * 24 * tokens * 1000 ** 2 / 100e6)
    assert found.hop == round(2 * tokens * 1000 / 10e3 + 10)
    parameters = layers * 12 * 1000 ** 2 + 5000 * 1000
    assert found.step[0] == round(4 * parameters / 10e3 + 32 * parameters / 1000e3)
    assert copy == pytest.approx(16 * parameters / 10e9)
    half, _ = costs(model, machine, pipelines=2, stages=2, tp=2)
    assert half.backward_weight[0] == round(layers * 24 * tokens * 1000 ** 2 / 200e6)
    with pytest.raises(PlanError, match="layers"):
        costs(model, machine, 2, 5)


def test_stalls_come_from_the_recovery_benchmark(tmp_path: Path):
    path = tmp_path / "recovery.json"
    path.write_text(json.dumps({"kinds": {"exit": {"median_ms": 200.0}, "rejoin": {"median_ms": 300.0}}}))
    assert Stalls.measured(path) == Stalls(exit=0.2, rejoin=0.3)
    path.write_text("{}")
    with pytest.raises(TraceError, match="recovery benchmark"):
        Stalls.measured(path)


def test_confidence_intervals_are_students():
    assert Estimate.of([1.0]) == Estimate(1.0, 0.0)
    assert Estimate.of([1.0, 2.0, 3.0]).half == pytest.approx(4.30 / 3 ** 0.5)
