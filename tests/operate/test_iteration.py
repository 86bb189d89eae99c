"""`recycle timeline RUN`: an iteration as it was, below its plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_recycle import cli
from megatron_recycle.plan import replay
from megatron_recycle.tools.operate.iteration import load, trace
from tests.observe.plans import simple_plan

PLAN = simple_plan(2, 2, 2, failed=("1:0",))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A job that has lost 1:0, and whose workers took a tenth longer than planned in iterations 25 and 50."""
    folder = tmp_path / "one"
    (folder / "timings").mkdir(parents=True)
    (folder / "plans").mkdir()
    PLAN.save(folder / "plans" / f"{PLAN.digest.rpartition(':')[2][:16]}.json")
    names = ["0:0", "0:1", "1:0", "1:1"]
    events = [{"t": 1.0, "event": "started", "generation": 1, "members": {}, "ranks": dict(zip(names, range(4))),
               "grid": {"stages": 2, "microbatches": [2, 2]}},
              {"t": 2.0, "event": "profiled", "generation": 2},
              {"t": 2.0, "event": "planned", "generation": 2, "digest": PLAN.digest, "period": PLAN.period},
              {"t": 2.5, "event": "decided", "generation": 2, "out": {"1:0": "exit"}},
              *({"t": 3.0 + number, "event": "committed", "generation": 2, "iteration": number}
                for number in range(51))]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    timeline = replay(PLAN)
    for rank, worker in ((0, "0:0"), (1, "0:1"), (3, "1:1")):
        times = next(times for name, times in timeline.times.items() if str(name) == worker)
        actions = next(actions for name, actions in PLAN.workers.items() if str(name) == worker)
        spans = [[1.1 * start, 1.1 * (end - start), "reduce" if action.kind == "S" else str(action)]
                 for action, (start, end) in zip(actions, times)]
        lines = [json.dumps({"v": 1, "iteration": number, "worker": worker, "t": 3.0 + number,
                             "spans": [[0, 0, "wait F0.0"], *spans]}) + "\n" for number in (25, 50)]
        (folder / "timings" / f"worker-{rank}.jsonl").write_text("".join(lines) + '{"v": 1, "iter')
    return folder


def test_the_latest_one_is_drawn_with_its_plan_above(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["timeline", str(run)]) == 0
    assert capsys.readouterr().out.split() == ["one-iteration-50.svg", "one-iteration-50.trace.json"]
    picture = (tmp_path / "one-iteration-50.svg").read_text()
    assert "plan (greedy), with measured costs" in picture and "iteration 50, generation 2, as it was" in picture
    found = json.loads((tmp_path / "one-iteration-50.trace.json").read_text())["traceEvents"]
    named = {(one["pid"], one["args"]["name"]) for one in found if one["name"] == "thread_name"}
    assert named == {(1, "0:0"), (1, "0:1"), (1, "1:1"), (2, "0:0"), (2, "0:1"), (2, "1:1")}
    ends = [max(one["ts"] + one["dur"] for one in found if one["ph"] == "X" and one["pid"] == process)
            for process in (1, 2)]
    assert ends[1] / ends[0] == pytest.approx(1.1)


def test_one_of_choice(run):
    found = load(run, 25)
    assert (found.number, found.generation, found.plan, found.unit) == (25, 2, PLAN, 1e-6)
    assert [len(spans) for spans in found.spans.values()] == [1 + len(PLAN.workers[worker]) for worker in sorted(
        PLAN.workers)]
    assert {one["cat"] for one in trace(found)["traceEvents"] if one["ph"] == "X"} == {"F", "B", "W", "S", "other"}


def test_one_that_nobody_has_written_down_is_refused_with_those_that_are_there(run, capsys):
    assert cli.main(["timeline", str(run), "--iteration", "31"]) == 2
    assert capsys.readouterr().err.strip() == (
        "recycle timeline: iteration 31 was not written down: workers write down every 25th, and those around a "
        "failure; there are 25, 50")


def test_wrong_calls_have_one_line_with_the_remedy(run, tmp_path, capsys):
    PLAN.save(tmp_path / "plan.json")
    for arguments, said in (
            ([str(tmp_path / "plan.json"), "--iteration", "3"], "is no folder of one"),
            ([str(run), str(tmp_path / "plan.json")], "give no second file"),
            ([str(run), "-o", str(tmp_path / "picture.gif")], "give a file name that ends in .png, .svg, .pdf"),
            ([str(tmp_path)], "is no run's")):
        assert cli.main(["timeline", *arguments]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    for file in (run / "timings").iterdir():
        file.unlink()
    assert cli.main(["timeline", str(run)]) == 2
    assert "no record of an iteration yet" in capsys.readouterr().err
