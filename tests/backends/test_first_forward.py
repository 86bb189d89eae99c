"""Real jobs whose layers draw from a generator out of sight end with its layer's name, on all ranks, before a step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.backends import gpt_job, habits_job
from tests.harness import Job

TEXT = "run twice with the same random seeds, has given different outputs on worker"


def hides(engine: Any) -> None:
    if engine.stage_id == 1:
        habits_job.draws(engine.module.forward_funcs[-1])


def ends_by_name(job: Job, layer: str) -> None:
    results = job.wait()
    finished = job.wait_event("finished")
    assert all(result.status == 1 for result in results.values()), job.where()
    assert finished["status"] == 1 and TEXT in finished["message"] and layer in finished["message"]
    assert not [event for event in job.events if event["event"] in ("suspected", "committed")]


@pytest.mark.processes
@pytest.mark.slow
def test_deepspeed():
    with Job(gpt_job.train, 4, {"stages": 2, "pipelines": 2, "watch": hides,
                                "settings": {"reduction": "exact"}}) as job:
        ends_by_name(job, "(Head)")


@pytest.mark.processes
@pytest.mark.night
def test_megatron():
    pytest.importorskip("megatron.core")
    arguments = {"habits": ("draws_out_of_sight",), "plugin": True, "reduction": "exact"}
    with Job(habits_job.train, 2, arguments) as job:
        ends_by_name(job, "(MLP)")
