"""`recycle profile` tells where the time of a run's iterations went."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_recycle import cli
from megatron_recycle.plan import Costs, Grid, Problem
from megatron_recycle.planner import quick


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run: its plan was made for other costs than those that it has measured."""
    plan = quick(Problem(Grid(2, (4, 4)), Costs.uniform(2, 1, 1, 1)))
    (tmp_path / "plans").mkdir()
    plan.save(tmp_path / "plans" / f"{plan.digest.rpartition(':')[2][:16]}.json")
    seconds = {name: {"actions": 0.11, "between": 0.01, "messages": 0.02, "own": 0.01}
               for name in ("0:0", "0:1", "1:0", "1:1")}
    events = [{"event": "planned", "digest": plan.digest},
              {"event": "spent", "iteration": 15, "costs": Costs.uniform(2, 9, 9, 9).to_json(), "seconds": seconds},
              {"event": "spent", "iteration": 40,
               "costs": Costs.uniform(2, 10_000, 10_000, 10_000, 500, 9000).to_json(),
               "seconds": {**seconds, "0:1": {**seconds["0:1"], "reduction": 0.01}}}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return tmp_path


def test_a_row_for_each_worker_and_what_the_plan_takes_with_these_costs(run: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["profile", str(run)]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].startswith("after iteration 40:") and "script" not in shown, "parts that take no time are left out"
    assert lines[1].split() == ["worker", "iteration", "actions", "between", "messages", "reduction", "own"]
    assert lines[3].split() == ["0:1", "160.0", "110.0", "10.0", "20.0", "10.0", "10.0"]
    assert lines[6].split()[:2] == ["mean", "152.5"]
    period = float(lines[-1].split("these costs ")[1].split()[0])
    assert lines[-1].startswith("an iteration takes 0.152 s") and 0.129 <= period <= 0.16, lines[-1]
    assert cli.main(["profile", str(run / "events.jsonl"), "--all"]) == 0
    assert capsys.readouterr().out.count("after iteration") == 2


def test_iterations_of_two_plans_are_compared_with_neither(run: Path, capsys: pytest.CaptureFixture[str]):
    """After a failure the latest iterations are of the plan before and the plan after it; a plan that was only offered
    is not in force."""
    path = run / "events.jsonl"
    told = path.read_text().splitlines()
    changes = [{"event": "planned", "generation": 1, "digest": json.loads(told[0])["digest"]},
               {"event": "planned", "generation": 1, "digest": "an offer"}, {"event": "resumed", "iteration": 29}]
    path.write_text("\n".join([*map(json.dumps, changes), told[-1]]) + "\n")
    assert cli.main(["profile", str(run)]) == 0 and "the plan with these costs" in capsys.readouterr().out
    path.write_text("\n".join([*map(json.dumps, [*changes, {"event": "resumed", "iteration": 30}]), told[-1]]) + "\n")
    assert cli.main(["profile", str(run)]) == 0
    assert "changed with iteration 30" in (last := capsys.readouterr().out.splitlines()[-1]) and "not compared" in last


def test_costs_of_stages_with_several_chunks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """By chunk, as they are measured; events of earlier releases have them by stage."""
    plan = quick(Problem(Grid(2, (4, 4)), Costs.uniform(4, 1, 1, 1), placement=(0, 1, 1, 0)))
    (tmp_path / "plans").mkdir()
    plan.save(tmp_path / "plans" / f"{plan.digest.rpartition(':')[2][:16]}.json")
    by_stage = Costs.uniform(2, 10_000, 10_000, 10_000, 500, 9000)
    by_chunk = replace(by_stage.by_chunk((0, 1, 1, 0)), forward=(10_000, 10_000, 10_000, 12_000))
    events = [{"event": "planned", "digest": plan.digest}, *(
        {"event": "spent", "iteration": 40, "costs": costs.to_json(),
         "seconds": {name: {"actions": 0.25} for name in ("0:0", "0:1", "1:0", "1:1")}} for costs in (
             by_stage, by_chunk))]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert cli.main(["profile", str(tmp_path), "--all"]) == 0
    costs, took = (lines := capsys.readouterr().out.splitlines())[-2:]
    assert costs.startswith("costs of the plan, ms by chunk of the model: F 10.0 10.0 10.0 12.0, B"), costs
    old, new = (float(line.split("these costs ")[1].split()[0]) for line in lines if "these costs" in line)
    assert 0.24 <= old < new, took


def test_without_one_it_says_when_there_will_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["profile", str(tmp_path)]) == 2 and "is no run's" in capsys.readouterr().err
    (tmp_path / "events.jsonl").write_text('{"event": "started"}\n')
    assert cli.main(["profile", str(tmp_path)]) == 2 and "after 16 iterations" in capsys.readouterr().err
    (tmp_path / "events.jsonl").write_text("[1]\n")
    assert cli.main(["profile", str(tmp_path)]) == 2 and "another version" in capsys.readouterr().err
