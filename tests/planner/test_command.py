"""``recycle plan`` as a user meets it: the paper's example, files in and out, and one line for every fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_recycle.plan import Plan, Worker, violations
from megatron_recycle.planner import search_process
from megatron_recycle.planner.command import add_arguments, run
from megatron_recycle.usage import Parser

PAPER = ["--pipelines", "3", "--stages", "4", "--microbatches", "6", "--failed", "1:2", "--no-moves"]
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def the_work_and_not_the_clock_ends_a_search(monkeypatch):
    """As on a machine that has the time."""
    monkeypatch.setattr(search_process, "RESERVE", -60.0)


def recycle_plan(capsys, *arguments):
    """Exit status, what was printed, and what went to standard error."""
    parser = Parser(prog="recycle plan")
    add_arguments(parser)
    status = run(parser.parse_args(list(arguments)))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def planned(capsys, *arguments):
    status, out, err = recycle_plan(capsys, *PAPER, "--json", *arguments)
    assert status == 0, err
    plan = Plan.from_json(json.loads(out))
    assert violations(plan) == []
    return plan


@pytest.mark.parametrize(("technique", "cap", "objective", "expected"), [
    ("none", None, "makespan", 27),
    ("adaptive", "4,3,2,1", "makespan", 36),
    ("adaptive", "4", "makespan", 33),
    ("decoupled", "4", "makespan", 29),
    ("staggered", "6", "period", 27),
])
def test_the_papers_example(capsys, technique, cap, objective, expected):
    plan = planned(capsys, "--technique", technique, *(["--cap", cap] if cap else []))
    assert getattr(plan, objective) == expected and plan.problem.objective == objective
    assert bool(plan.problem.failed) == (technique != "none")
    if technique in ("staggered", "decoupled"):
        assert plan.lower_bound == expected


@pytest.mark.parametrize("name", ["none", "adaptive", "decoupled", "staggered"])
def test_the_papers_example_comes_out_as_the_golden_file(capsys, name):
    """Same input, seed and work: same plan, on every machine. A better planner may write these files anew."""
    golden = Plan.load(GOLDEN / f"{name}.json")
    caps = {"none": None, "adaptive": "4", "decoupled": "4", "staggered": "6"}
    plan = planned(capsys, "--technique", name, *(["--cap", caps[name]] if caps[name] else []))
    assert violations(golden) == [] and plan.digest == golden.stated == golden.digest


def test_without_failure_split_and_staggered(capsys):
    status, out, _ = recycle_plan(capsys, "--pipelines", "3", "--stages", "4", "--microbatches", "6", "--cap",
                                  "6", "--json")
    assert status == 0 and json.loads(out)["period"] == 19


def test_the_table_and_the_drawing(capsys):
    status, out, _ = recycle_plan(capsys, *PAPER, "--cap", "6")
    assert status == 0
    for line in ("period", "makespan", "bound", "gap", "bubbles", "peak activations", "guests", "moves", "source",
                 "time to first plan", "time to best plan"):
        assert line in out
    assert "1:2  failed" in out and "f" in out.split("small letters")[0]


def test_drop_leaves_the_hit_pipeline_out(capsys):
    plan = planned(capsys, "--technique", "drop", "--cap", "6", "--costs", "20,22,18", "--hop-cost", "1",
                   "--step-cost", "15")
    assert plan.source == "drop" and plan.period <= 607
    assert all(len(plan.workers[w]) == 1 for w in plan.workers if w.pipeline == 1)


def test_a_plan_file_goes_out_and_is_checked(capsys, tmp_path):
    path, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    pytest.importorskip("matplotlib")
    status, _, err = recycle_plan(capsys, *PAPER, "--output", str(path), "--picture", str(picture), "--block", "2",
                                    "--speed", "0:1=1.5", "--budget", "0")
    assert status == 0, err
    assert picture.read_text().lstrip().startswith("<?xml")
    status, out, _ = recycle_plan(capsys, "--check", str(path))
    assert status == 0 and "legal" in out


def test_the_chunks_of_a_stage_have_letters_of_their_own(capsys):
    small = ["--pipelines", "1", "--stages", "2", "--microbatches", "2", "--chunks", "2", "--budget", "0"]
    for costs in (["--costs", "4,4,4"], []):
        status, out, _ = recycle_plan(capsys, *small, *costs)
        rows = [line.split() for line in out.splitlines() if line.strip().startswith("0:")]
        assert status == 0 and all(set("FEBAWV") <= set(row[1]) for row in rows[-2:]), rows
    status, _, err = recycle_plan(capsys, *small, "--costs", "1,2,2")
    assert status == 2 and "a cost of 1 cannot be halved" in err


def test_full_backwards_are_in_the_plan_and_in_the_drawing(capsys):
    _, split, _ = recycle_plan(capsys, *PAPER, "--cap", "6", "--budget", "0", "--json")
    status, out, _ = recycle_plan(capsys, *PAPER, "--cap", "6", "--budget", "0", "--json", "--full-backward")
    full = Plan.from_json(json.loads(out))
    assert status == 0 and full.period == json.loads(split)["period"] and violations(full) == []
    assert any(action.kind == "FB" for action in full.workers[Worker(0, 0)])
    _, out, _ = recycle_plan(capsys, *PAPER, "--cap", "6", "--budget", "0", "--full-backward")
    row = next(line for line in out.splitlines() if line.startswith("   0:0 "))
    assert "DD" in row and "D is a full backward, B and W in one" in out


def test_moves_are_part_of_the_plan(capsys):
    arguments = ["--pipelines", "8", "--stages", "4", "--microbatches", "16", "--failed", "0:1,1:1", "--cap", "6",
                 "--budget", "0", "--json"]
    _, moved, _ = recycle_plan(capsys, *arguments)
    _, stayed, _ = recycle_plan(capsys, *arguments, "--no-moves")
    moved, stayed = Plan.from_json(json.loads(moved)), Plan.from_json(json.loads(stayed))
    assert stayed.problem.failed == (Worker(0, 1), Worker(1, 1))
    ((mover, to),) = moved.stats["moves"].items()
    assert set(moved.problem.failed) == {*stayed.problem.failed, Worker.parse(mover)} - {Worker.parse(to)}
    assert moved.period < stayed.period and violations(moved) == []


def test_a_stage_that_only_moves_could_fill_is_pointed_out(capsys):
    arguments = ["--pipelines", "2", "--stages", "2", "--microbatches", "2", "--budget", "0"]
    status, out, err = recycle_plan(capsys, *arguments, "--failed", "0:0", "1:0")
    assert status == 1 and "nobody holds those of stage 0: a running job ends here" in out and "of stage 0" in err
    assert "takes the place of 1:0" in out or "takes the place of 0:0" in out
    status, out, err = recycle_plan(capsys, *arguments, "--failed", "0:0", "1:1")
    assert status == 0 and "nobody holds" not in out + err


@pytest.mark.parametrize(("arguments", "fault"), [
    (["--failed", "7:2"], "7:2 is outside the grid"),
    (["--failed", "x"], "'x'"),
    (["--failed", "0:2,2:2"], "stage 2 has no live worker"),
    (["--failed", "0:2", "2:2"], "stage 2 has no live worker"),
    (["--cap", "0"], "cap"),
    (["--cap", "4,4"], "4 are needed"),
    (["--costs", "1,-1,1"], "negative"),
    (["--costs", "1,1.5,1"], "integers"),
    (["--costs", "1,1"], "3 are needed"),
    (["--costs", "1,1,1;1,1,1"], "2 stages"),
    (["--hop-cost", "-1"], "--hop-cost"),
    (["--hop-cost", "0.5"], "integers"),
    (["--step-cost", "1.5"], "integers"),
    (["--pipelines", "three"], "--pipelines"),
    (["--technique", "magic"], "'magic'"),
    (["--budget", "nan"], "--budget"),
    (["--move-cost", "-1"], "--move-cost"),
    (["--output", "/proc/nowhere/plan.json", "--budget", "0"], "cannot be written"),
    (["--speed", "0:0=fast"], "0:0=fast"),
    (["--microbatches", "6,6"], "3 are needed"),
    (["--check", "/nowhere/plan.json"], "cannot be read"),
    (["--technique", "drop", "--failed", "0:0,2:0"], "every pipeline lost a worker"),
])
def test_bad_input_gets_one_line_and_status_2(capsys, arguments, fault):
    try:
        status, out, err = recycle_plan(capsys, *PAPER, *arguments)
    except SystemExit as end:  # argparse's own way
        status, (out, err) = end.code, capsys.readouterr()
    assert status == 2 and out == ""
    assert fault in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(("change", "fault"), [
    (lambda orders: orders.remove("W0.2"), "W0.2 is missing"),
    (lambda orders: orders.insert(0, orders.pop(orders.index("B0.5"))), "B0.5"),
])
def test_a_broken_plan_file_is_refused(capsys, tmp_path, change, fault):
    path = tmp_path / "plan.json"
    recycle_plan(capsys, *PAPER, "--output", str(path), "--budget", "0")
    value = json.loads(path.read_text())
    change(value["workers"]["0:0"])
    path.write_text(json.dumps(value))
    status, _, err = recycle_plan(capsys, "--check", str(path))
    assert status == 2 and fault in err and len(err.splitlines()) == 1


def test_a_plan_file_that_deadlocks_is_refused(capsys, tmp_path):
    path = tmp_path / "plan.json"
    recycle_plan(capsys, "--pipelines", "1", "--stages", "2", "--microbatches", "2", "--output", str(path))
    value = json.loads(path.read_text())
    value["workers"] = {"0:0": ["F0.0", "B0.0", "W0.0", "F0.1", "B0.1", "W0.1", "S"],
                        "0:1": ["F0.1", "B0.1", "W0.1", "F0.0", "B0.0", "W0.0", "S"]}
    path.write_text(json.dumps(value))
    status, _, err = recycle_plan(capsys, "--check", str(path))
    assert status == 2 and "deadlock" in err and "can never start" in err


def test_a_worker_that_moves_is_no_failed_one_in_the_drawing(capsys):
    status, out, _ = recycle_plan(capsys, "--pipelines", "2", "--stages", "2", "--microbatches", "3", "--failed",
                                  "0:1,1:1")
    assert status == 1 and "   1:0  moved to 0:1\n   1:1  failed\n" in out
