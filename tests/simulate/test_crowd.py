"""Members that speak all at once lead the machine where members that speak one by one do."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from megatron_recycle.control.moves import moves_of
from megatron_recycle.control.planning import problem_of
from megatron_recycle.control.searches import Plans
from megatron_recycle.membership.description import Job
from megatron_recycle.membership.state import State
from megatron_recycle.plan import Grid
from megatron_recycle.tools.simulate.members import Members
from tests.membership.cluster import PLAN, Cluster

DESCRIPTION = Job(grid=Grid(2, (4,) * 3), block=2, reduction="exact")


def crowd(**other: Any) -> Members:
    positions = {f"{d}:{s}": "host" for d in range(3) for s in range(2)}
    plans = Plans(lambda job, failed: replace(PLAN, failed=sorted(failed)), None,
                  lambda job, failed: moves_of(problem_of(job, failed), job))
    return Members(positions, replace(DESCRIPTION, **other), plans)


def shape(state: State) -> tuple[Any, ...]:
    """What decides how a job goes on."""
    resume = state.resume
    assert resume is not None and state.go is not None
    progress = state.progress
    return (state.phase, state.generation, sorted(state.members), dict(state.absent.out),
            sorted(state.arrivals.unproven), (resume.target, resume.next, resume.attempt), progress.committed,
            dict(progress.committed_by), progress.behind, sorted(state.round.resumed), state.since,
            state.go.plan.failed)


def test_all_at_once_is_one_by_one():
    single, together = Cluster(3, 2).train(), crowd()
    assert shape(single.state) == shape(together.state)
    for iteration in range(3):
        single.commit_all(iteration)
    single.exit("1:1")
    assert single.reports(iteration=3, holds=2, committed=2)
    single.plan()
    single.resume_all()
    together.lose(["1:1"], False, 100.0, 3)
    assert shape(single.state) == shape(together.state)


def test_a_worker_comes_back_at_a_boundary():
    job = crowd()
    job.lose(["1:1"], False, 100.0, 3)
    assert job.empty == ["1:1"] and not job.asked.switch
    assert job.come("1:1", "host", 110.0, 5) and not job.come("1:1", "other", 110.0, 5)
    assert job.asked.switch and job.empty == []
    job.stand(111.0, 6)
    assert not job.asked.switch and sorted(job.state.members) == sorted(f"{d}:{s}" for d in range(3) for s in range(2))
    assert job.state.generation == 3 and not job.state.absent.out


def test_a_worker_moves_where_a_stage_was_hit_too_hard():
    job = crowd(moves=True, max_restarts=0, move_cost=1.0, horizon=100.0)
    job.lose(["0:1", "1:1"], True, 100.0, 3)
    assert job.asked.moves is not None
    job.find_moves()
    (to, beside), = job.asked.starts
    assert to in ("0:1", "1:1") and job.at_rank(beside).endswith(":0")
    job.come(to, "host", 130.0, 8)
    job.stand(131.0, 9)
    job.commit(11, 133.0)
    assert job.asked.switch
    job.stand(134.0, 12)
    stages = [name[-1] for name in job.state.members]
    assert sorted(stages) == ["0", "0", "1", "1"]


def test_the_job_ends_with_its_last_worker_of_a_stage():
    job = crowd()
    job.lose(["0:1", "1:1", "2:1"], True, 100.0, 3)
    assert job.asked.end is not None and job.asked.end.again


@pytest.mark.parametrize("policy", ["drop", "rollback", "lossy_forward"])
def test_whole_pipelines_by_policy(policy: str):
    job = crowd(policy=policy)
    job.lose(["0:1"], False, 100.0, 3)
    assert job.training and job.state.generation == 2
    assert list(job.state.go.without) == ([] if policy == "drop" else [0])
