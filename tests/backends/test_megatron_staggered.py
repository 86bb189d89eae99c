"""`step: staggered` under Megatron's own interfaces: the loop sets the learning rate and takes the gradient norm
between steps that may still be undone, and ends with the bits of stages that wait for each other."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_recycle.backends.options import Options
from megatron_recycle.config import RecycleConfig
from tests.backends import megatron_job
from tests.backends.comparing import check_survivors, differences
from tests.harness import Hold, Job, Result
from tests.references import calm_run

pytest.importorskip("megatron.core")
from megatron_recycle.backends.megatron.schedule import RecycleSchedule

pytestmark = pytest.mark.processes

ALWAYS = ("--clip", "0.05")
"""A limit on the gradient norm below every norm that occurs: each early step is wrong and has to be undone."""
DECAY = ("--min-lr", "1e-4")


def arguments(*options: str, step: str = "staggered", reduction: str = "exact", **changes: Any) -> dict[str, Any]:
    """Of a job. With `fast` a step may be undone when the script goes on already."""
    return {"pipelines": 2, "stages": 2, "iterations": 5, "options": (*DECAY, *options),
            "settings": {"reduction": reduction, "step": step}, **changes}


def waiting(*options: str, reduction: str = "exact") -> dict[int, Result]:
    """The job without failures whose stages wait for each other."""
    return calm_run(megatron_job.train, 4, arguments(*options, step="barrier", reduction=reduction))


@pytest.mark.night
@pytest.mark.parametrize("reading", [(), ("--log-every", "1")], ids=" ".join)
def test_steps_undone_in_every_iteration_leave_the_bits_of_waiting(reading):
    """``reading``: one worker waits for each norm, and undoes its step, after the loop has set the next rate."""
    calm = waiting(*ALWAYS, reduction="fast")
    with Job(megatron_job.train, 4, arguments(*ALWAYS, *reading, reduction="fast")) as job:
        results = job.wait()
    for rank, result in results.items():
        assert result.status == 0, result.error
        assert not differences(result, calm[rank])
        assert result.value["norms"] == calm[rank].value["norms"]
    assert {event["iteration"] for event in job.events if event["event"] == "rolled_back"} == {0, 1, 2}


@pytest.mark.night
@pytest.mark.parametrize(("options", "hold"), [
    (("--clip", "0.05", "--bf16"), Hold("0:1", "reduce", 3)),
    (("--clip", "0", "--eval-every", "2"), Hold("1:0", "stepped", 1))], ids=str)
def test_a_worker_killed_while_stages_are_a_step_apart(options, hold):
    with Job(megatron_job.train, 4, arguments(*options), [hold]) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {hold.worker}, waiting(*options))


def settles(job: Job, iteration: int, stage: int) -> None:
    """Until all workers of ``stage`` have stepped ``iteration`` and wait for its verdict: no event tells of that."""
    coordinator, limit = job._coordinator, time.monotonic() + 60
    members = [member for member in coordinator.state.members.values() if member.worker.endswith(f":{stage}")]
    while any((told.get("iteration"), told.get("phase"), told["doing"]["what"]) != (iteration, "stepped", "a verdict")
              for told in (coordinator.progress[member.incarnation] for member in members)):
        assert time.monotonic() < limit, coordinator.progress
        time.sleep(0.01)


@pytest.mark.night
@pytest.mark.slow
def test_an_iteration_that_is_redone_when_the_script_has_turned_to_evaluation_is_one_of_training():
    """The last stage has stepped it, and its script has switched dropout and gradients off, when all undo it."""
    options, hold = ("--clip", "0", "--untied", "--eval-every", "2"), Hold("0:0", "reduce", 1)
    with Job(megatron_job.train, 4, arguments(*options, reduction="fast"), [hold]) as job:
        job.wait_held()
        settles(job, 1, stage=1)
        job.kill(hold)
        check_survivors(job, {hold.worker}, waiting(*options, reduction="fast"), within=1e-4)


@pytest.mark.night
def test_compiled_layers():
    options, hold = ("--clip", "0"), Hold("1:0", "backward", 2, 1)
    with Job(megatron_job.train, 4, arguments(*options, compiled=True), [hold]) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {hold.worker}, waiting(*options))


def test_a_script_waits_for_the_last_step_by_settle_which_the_schedule_has():
    """As docs/differences.md says; before the first call there is nothing to wait for."""
    schedule, waits = RecycleSchedule(RecycleConfig(), Options()), list[None]()
    schedule.settle()
    schedule.session, schedule._microbatches = SimpleNamespace(settle=lambda: waits.append(None)), 4
    schedule.settle()
    assert len(waits) == 1


@pytest.mark.night
def test_tensor_parallel_parts_undo_their_steps_together():
    calm = calm_run(megatron_job.train, 8, arguments(*ALWAYS, step="barrier", tensor=2))
    hold = Hold("1:0.1", "stepped", 2)
    with Job(megatron_job.train, 8, arguments(*ALWAYS, tensor=2), [hold]) as job:
        job.wait_held()
        job.kill(hold)
        results = job.wait()
    assert {event["iteration"] for event in job.events if event["event"] == "rolled_back"} >= {0, 1}
    found = [rank for rank, result in results.items() if result.value is not None]
    assert len(found) == 6
    for rank in found:
        assert not differences(results[rank], calm[rank])
