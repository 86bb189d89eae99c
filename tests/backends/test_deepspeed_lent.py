"""Layers of a DeepSpeed pipeline that a neighbouring stage's workers run, as crossings that are given by hand say."""

from __future__ import annotations

import pytest

from tests.backends import gpt_job, tensor_job
from tests.backends.comparing import check_survivors, differences
from tests.harness import Hold, Job
from tests.references import calm_run

JOB = {"pipelines": 3, "stages": 2, "iterations": 4, "by_hand": True, "checkpoint": 1,
       "engine_settings": {"pipeline": {"use_reentrant": False}},
       "settings": {"reduction": "exact", "lend": "auto"}}


@pytest.mark.processes
@pytest.mark.night
def test_a_worker_comes_back_while_layers_are_lent_and_the_script_changes_one_later():
    """The planner lends them. Who comes back ends that; another failure begins it anew, and a layer that cannot be lent
    any more ends it for good: each time training goes on, with the same bits."""
    calm = {**JOB, "iterations": 22, "blocks": 6}
    reference = calm_run(gpt_job.train, 6, calm)
    planning = {"costs": "200,220,180", "planner_budget": 0.5, "horizon": 1e6}
    dies, again = Hold("1:1", "backward", 1, 1), Hold("2:1", "backward", 11, 1)
    late, back, later = (Hold("0:0", "forward", iteration) for iteration in (3, 8, 13))
    arguments = {**calm, "hooks": 14, "settings": {**JOB["settings"], **planning}}
    with Job(gpt_job.train, 6, arguments, [dies, again, late, back, later]) as job:
        for number, (first, second) in enumerate([(dies, late), (again, later)]):
            job.wait_held(first)
            job.kill(first)
            job.wait_held(second)
            job.wait_until(lambda number=number: any("lending" in event and event["generation"] > 2 * number
                                                     for event in job.events), "a plan that lends")
            job.release(second)
            if second == late:
                job.wait_held(back)
                job.rejoin(4)
                job.wait_event("waiting", worker="1:1")
                job.release(back)
        check_survivors(job, {"2:1"}, reference)
        assert job.wait_event("unlent", stage=1)
        lent = {iteration for result in job.wait().values() if result.status == 0
                for iteration in result.value["borrowed"]}
    assert {iteration < 10 for iteration in lent} == {True, False} and not {10, 11, 21} & lent, lent


@pytest.mark.night
@pytest.mark.processes
def test_whoever_runs_a_layer_the_bits_are_the_same():
    """Every backward of a block runs it again, and it has dropout. In the last iteration the embedding is frozen, which
    is all that the first stage runs of some micro-batches."""
    reference = calm_run(gpt_job.train, 6, JOB)
    dies = Hold("1:1", "backward", 1, 1)
    with Job(gpt_job.train, 6, {**JOB, "lends": True}, [dies]) as job:
        job.wait_held()
        job.kill(dies)
        check_survivors(job, {"1:1"}, reference)
        borrowed = [result.value["borrowed"] for result in job.wait().values() if result.status == 0]
    assert any(borrowed) and not any(result.value["borrowed"] for result in reference.values())


@pytest.mark.night
@pytest.mark.processes
@pytest.mark.parametrize("zero", [0, 1])
def test_parts_of_a_worker_borrow_the_equal_parts_of_a_layer(zero):
    """Each sums over its own worker's group in another stage's layer, and draws its own part's random numbers."""
    arguments = {"pipelines": 2, "stages": 2, "parts": 2, "dropout": 0.1, "zero": zero,
                 "settings": {"reduction": "exact", "lend": "auto"}}
    reference, dies = calm_run(tensor_job.train, 8, arguments), Hold("1:1.1", "backward", 1, 1)
    with Job(tensor_job.train, 8, {**arguments, "lends": True}, [dies]) as job:
        job.wait_held()
        job.kill(dies)
        results = job.wait()
        lost = {rank for name, rank in job.wait_event("started")["ranks"].items() if name.startswith("1:1")}
        left = {rank: result for rank, result in results.items() if rank not in lost}
        assert all(result.status == 0 for result in left.values()), job.where()
    for rank, result in left.items():
        found = differences(result, reference[rank])
        assert not {name for name in found if not zero or not name.startswith("state")}, (rank, found)
    assert any(result.value["borrowed"] for result in left.values())
