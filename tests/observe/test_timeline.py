"""Pictures of plans: what a reader of one can see, at the size of the quickstart and at 128 workers."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path

import pytest

from megatron_recycle import cli
from megatron_recycle.errors import ConfigError
from megatron_recycle.plan import Action, DeadlockError, Worker, lower_bound, replay
from megatron_recycle.planner.merge_bw import merged
from megatron_recycle.tools.timeline import COLOURS, FAILED, boxes, draw
from tests.observe.plans import simple_plan


def test_every_action_is_one_box_at_the_time_of_the_replay_and_guests_are_marked():
    plan = simple_plan(3, 2, 4, failed=("1:1",))
    timeline = replay(plan)
    shown = boxes(plan, timeline)
    assert len(shown) == sum(len(actions) for actions in plan.workers.values())
    assert max(box.end for box in shown) == timeline.makespan
    guests = [(str(box.worker), box.kind, box.text) for box in shown if box.guest]
    assert sorted(guests) == sorted(
        (worker, kind, f"1.{microbatch}")
        for kind in "FBW"
        for worker, microbatch in (("0:1", 0), ("2:1", 1), ("0:1", 2), ("2:1", 3))
    )
    assert {box.worker for box in shown} == set(plan.problem.live_workers())


def test_what_was_done_before_is_left_out():
    plan = simple_plan(2, 2, 2)
    rest = dataclasses.replace(plan, done={Worker(0, 0): 2})
    assert len(boxes(rest, replay(rest))) == len(boxes(plan, replay(plan))) - 2


def back_to_back(action: Action) -> tuple[bool, int, int, str]:
    """All forwards, then B and W of each micro-batch."""
    return (action.kind != "F", action.microbatch, action.pipeline, action.kind)


def test_a_picture_shows_all_kinds_the_failed_worker_its_guests_and_a_legend(tmp_path: Path):
    plan = simple_plan(3, 2, 4, failed=("1:1",))
    problem = dataclasses.replace(plan.problem, full_backward=(0,))
    orders = {worker: merged(problem, worker, sorted(actions[:-1], key=back_to_back)) + actions[-1:]
              for worker, actions in plan.workers.items()}
    draw(tmp_path / "plan.svg", (dataclasses.replace(plan, problem=problem, workers=orders), "after the kill"))
    picture = (tmp_path / "plan.svg").read_text()
    for colour in (*COLOURS.values(), FAILED):
        assert colour in picture
    words = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
    for word in (
        "1:1",
        "failed",
        "1.0",
        "1.3",
        "F  forward",
        "W  weight gradient",
        "FB  both gradients in one",
        "guest (of another pipeline)",
    ):
        assert word in words
    assert any(
        word.startswith("after the kill: 3 pipelines x 2 stages x 4") and "failed 1:1" in word
        for word in words
    )
    assert "hatch" in picture or "<pattern" in picture


def test_without_failures_no_guest_and_no_failed_worker_are_promised(tmp_path: Path):
    draw(tmp_path / "plan.svg", (simple_plan(2, 2, 2), ""))
    picture = (tmp_path / "plan.svg").read_text()
    assert "guest" not in picture and "failed" not in picture and "<pattern" not in picture


def test_two_plans_share_one_time_axis(tmp_path: Path):
    before, after = simple_plan(3, 4, 6), simple_plan(3, 4, 6, failed=("1:2",))
    draw(tmp_path / "pair.svg", (before, "healthy"), (after, "degraded"))
    picture = (tmp_path / "pair.svg").read_text()
    assert "healthy: 3 pipelines" in picture and "degraded: 3 pipelines" in picture


def test_a_step_without_cost_and_an_idle_worker_are_drawn(tmp_path: Path):
    plan = simple_plan(2, 2, (2, 0), step=0)
    assert [str(action) for action in plan.actions(Worker(1, 0))] == ["S"]
    draw(tmp_path / "plan.svg", (plan, ""))
    picture = (tmp_path / "plan.svg").read_text()
    assert picture.count(COLOURS["S"]) == 4 + 1  # a line for each worker's step, and the legend
    assert "2 pipelines x 2 stages x 0 to 2 micro-batches" in picture


def test_128_workers_are_drawn_in_seconds(tmp_path: Path):
    plan = simple_plan(16, 8, 16, failed=("1:2", "5:5"), unit=1000)
    begin = time.perf_counter()
    draw(tmp_path / "plan.png", (plan, ""))
    assert time.perf_counter() - begin < 60
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plan.png").stat().st_size < 1_000_000


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path):
    plan = simple_plan(2, 2, 2)
    for name in ("a.svg", "b.svg"):
        draw(tmp_path / name, (plan, ""))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_plan_that_deadlocks_and_an_unknown_ending_are_refused(tmp_path: Path):
    plan = simple_plan(2, 2, 2)
    turned = {worker: (*reversed(actions[:-1]), actions[-1]) for worker, actions in plan.workers.items()}
    with pytest.raises(DeadlockError):
        draw(tmp_path / "plan.png", (dataclasses.replace(plan, workers=turned), ""))
    with pytest.raises(ConfigError, match=r"\.png, \.svg, \.pdf"):
        draw(tmp_path / "plan.jpeg", (plan, ""))
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(tmp_path / "missing" / "plan.png", (plan, ""))
    assert not (tmp_path / "missing").exists()


def test_recycle_timeline_draws_a_plan_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    plan = tmp_path / "plan.json"
    made = simple_plan(2, 2, 2)
    dataclasses.replace(made, lower_bound=lower_bound(made.problem)).save(plan)
    assert cli.main(["timeline", str(plan)]) == 0 and (tmp_path / "plan.png").exists()
    assert capsys.readouterr().out == "plan.png\n"
    assert cli.main(["timeline", str(tmp_path)]) == 2 and "is no run's" in capsys.readouterr().err
    assert cli.main(["timeline", str(plan), str(plan), "-o", str(tmp_path / "two.svg")]) == 0
    assert (tmp_path / "two.svg").read_text().count(f"{plan}: 2 pipelines") == 2
    plan.write_text("{}")
    capsys.readouterr()
    assert cli.main(["timeline", str(plan), "-o", str(tmp_path / "x.svg")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("recycle timeline: ") and message.count("\n") == 1 and str(plan) in message


def test_recycle_timeline_draws_no_plan_that_breaks_the_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "plan.json"
    made = simple_plan(2, 2, 2)
    broken = dataclasses.replace(made, workers={**made.workers, Worker(9, 9): made.workers[Worker(0, 0)]})
    broken.save(path)
    assert cli.main(["timeline", str(path), "-o", str(tmp_path / "x.svg")]) == 2
    assert capsys.readouterr().err.startswith(f"recycle timeline: {path}: illegal plan: listed: worker 9:9")
    assert not (tmp_path / "x.svg").exists()
