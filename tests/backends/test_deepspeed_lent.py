"""Layers of a DeepSpeed pipeline that a neighbouring stage's workers run, as crossings that are given by hand say."""

from __future__ import annotations

import pytest

from tests.backends import gpt_job
from tests.backends.comparing import check_survivors
from tests.harness import Hold, Job
from tests.references import calm_run

JOB = {"pipelines": 3, "stages": 2, "iterations": 4, "noisy": True, "checkpoint": 1,
       "settings": {"reduction": "exact", "lend": "auto"}}


@pytest.mark.night
@pytest.mark.processes
def test_whoever_runs_a_layer_the_bits_are_the_same():
    """Every backward of a block runs it again, and it draws random numbers from all kinds of generators."""
    reference = calm_run(gpt_job.train, 6, JOB)
    dies = Hold("1:1", "backward", 1, 1)
    with Job(gpt_job.train, 6, {**JOB, "lends": True}, [dies]) as job:
        job.wait_held()
        job.kill(dies)
        check_survivors(job, {"1:1"}, reference)
        borrowed = [result.value["borrowed"] for result in job.wait().values() if result.status == 0]
    assert any(borrowed) and not any(result.value["borrowed"] for result in reference.values())
