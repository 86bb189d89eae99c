"""`recycle chaos random`: what it may hit, for as long as the job runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recycle.tools.chaos.dice import Dice
from megatron_recycle.tools.chaos.orders import Order
from megatron_recycle.tools.chaos.target_job import TargetJob, TargetProcess


@pytest.fixture
def job(tmp_path: Path) -> TargetJob:
    made = TargetJob(tmp_path)
    places = [(d, s) for d in range(3) for s in (0, 1)]
    made.workers = {f"{d}:{s}": TargetProcess(f"{d}:{s}", 2 * d + s, 100 + 2 * d + s, 0.0) for d, s in places}
    return made


def hit_all(dice: Dice, job: TargetJob) -> list[str]:
    hit: list[str] = []
    while (order := dice.order(job)) is not None:
        hit += order.workers
        job.out |= set(order.workers)
    return hit


def test_a_worker_that_has_come_back_can_be_hit_again_and_again(job: TargetJob) -> None:
    dice = Dice(5, 60.0, ("kill",), observed=False)
    for life in range(1, 20):
        hit = hit_all(dice, job)
        assert len(hit) == 4 and {worker[-1] for worker in hit} == {"0", "1"}, "one of each stage is left"
        for worker in hit:  # they are started again, and joined
            old = job.workers[worker]
            job.workers[worker] = TargetProcess(worker, old.rank, old.pid + 1000, float(life))
            job.out.discard(worker)


def test_a_process_that_is_hit_and_not_out_yet_is_no_copy_to_count_on(job: TargetJob) -> None:
    dice = Dice(5, 60.0, ("kill",), observed=False)
    orders = [dice.order(job) for _ in range(5)]
    hit = [order.workers[0] for order in orders if order is not None]
    assert len(hit) == len(set(hit)) == 4 and orders[4] is None


def test_a_worker_whose_moment_never_came_was_not_hit(job: TargetJob) -> None:
    dice = Dice(5, 60.0, ("kill",), observed=True)
    while (order := dice.order(job)) is not None:
        last = order
    assert dice.victims(job) == []
    dice.spared(last)
    assert last.workers[0] in dice.victims(job)


def test_the_last_worker_of_a_stage_is_hit_only_if_that_is_asked_for(job: TargetJob) -> None:
    job.out = {"1:0", "2:0"}
    assert "0:0" not in Dice(5, 60.0, ("kill",), observed=False).victims(job)
    assert "0:0" in Dice(5, 60.0, ("kill",), observed=False, last=True).victims(job)


def test_a_worker_that_has_left_is_none(job: TargetJob, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"t": 1.0, "event": "left", "worker": "0:1", "kind": "leave"}\n')
    job.follow()
    job.out |= {"1:1"}
    assert not {"0:1", "1:1", "2:1"} & set(Dice(5, 60.0, ("kill",), observed=False).victims(job))
    assert isinstance(Dice(5, 60.0, ("coordinator",), observed=False).order(job), Order)


def test_the_first_stages_are_held_at_weight_gradients_that_surely_come(job: TargetJob) -> None:
    """Its later backwards may be full ones, which have none."""
    moments = [Dice(seed, 60.0, ("kill",), observed=True).order(job) for seed in range(300)]
    found = {(order.workers[0][-1], order.nth) for order in moments if order and order.phase == "weight"}
    assert {nth for stage, nth in found if stage == "0"} == {0}
    assert {nth for stage, nth in found if stage == "1"} > {0}


def test_of_a_stage_whose_workers_have_parts_one_worker_is_left_whole(tmp_path: Path) -> None:
    job = TargetJob(tmp_path)
    names = [f"{d}:{s}.{part}" for d in range(3) for s in (0, 1) for part in (0, 1)]
    job.workers = {name: TargetProcess(name, rank, 100 + rank, 0.0) for rank, name in enumerate(names)}
    hit = hit_all(Dice(5, 60.0, ("kill",), observed=False), job)
    assert len(hit) == 4 and len({name.partition(".")[0] for name in hit}) == 4
    assert sorted(name[2] for name in hit) == ["0", "0", "1", "1"]
