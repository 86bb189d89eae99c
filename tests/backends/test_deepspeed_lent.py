"""Layers of a DeepSpeed pipeline that a neighbouring stage's workers run, as crossings that are given by hand say."""

from __future__ import annotations

import pytest

from tests.backends import gpt_job
from tests.backends.comparing import check_survivors
from tests.harness import Hold, Job
from tests.references import calm_run

JOB = {"pipelines": 3, "stages": 2, "iterations": 4, "by_hand": True, "checkpoint": 1,
       "engine_settings": {"pipeline": {"use_reentrant": False}},
       "settings": {"reduction": "exact", "lend": "auto"}}


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
