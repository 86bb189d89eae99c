"""Data that no worker can read: the job ends with what it says, and stock goes on from where it ended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.backends import gpt_job
from tests.harness import Job

# Read by pipeline 1, whose samples are 1, 4, 7, ...: it is its 21st, in its 11th micro-batch.
CORRUPT, WHERE = 61, "micro-batch 1.2 of iteration 2"


@pytest.mark.night
@pytest.mark.slow
@pytest.mark.processes
def test_a_sample_that_nobody_can_read_ends_the_job_with_its_text_and_stock_loads_what_it_has_saved(tmp_path: Path):
    settings = {"emergency_checkpoint": str(tmp_path)}
    with Job(gpt_job.train, 6, {"corrupt": CORRUPT, "settings": settings}) as job:
        results = job.wait()
        finished = job.wait_event("finished")
        assert all(result.status == 1 for result in results.values()), job.where()
        suspected = [event for event in job.events if event["event"] == "suspected"]
    assert finished["message"].startswith(f"{WHERE} fails on every worker: ValueError: sample 61 is corrupt (in F1.2")
    assert finished["message"].endswith(f"The state after iteration 1 is saved in {tmp_path}/global_step2.")
    assert [event.get("removed", True) for event in suspected] == [True, False], "one is out, one waits"
    assert {event["error"] for event in suspected} == {"ValueError: sample 61 is corrupt"}
    assert (tmp_path / "latest").read_text() == "global_step2"
    with Job(gpt_job.train, 6, {"iterations": 2}) as job:
        calm = job.wait()
    arguments = {"iterations": 0, "plugin": False, "load": (str(tmp_path), {})}
    with Job(gpt_job.train, 6, arguments, coordinated=False) as job:
        loaded = job.wait()
    for rank, result in loaded.items():
        assert result.value is not None, result.error
        assert result.value["counters"]["steps"] == 2
        for name, parameter in result.value["parameters"].items():
            assert np.array_equal(parameter, calm[rank].value["parameters"][name])
        for state, other in zip(result.value["state"], calm[rank].value["state"], strict=True):
            assert all(np.array_equal(state[key], other[key]) for key in other)


@pytest.mark.processes
def test_a_job_that_leaves_such_a_micro_batch_out_trains_what_stock_trains_without_it():
    # D = 2: the first worker that meets it is out, and the second one, its stage's last, goes on.
    shared = {"pipelines": 2, "iterations": 4, "dropout": 0.0}
    corrupt = 37  # read by pipeline 1, its 19th, in its 10th micro-batch: 1.1 of iteration 2
    with Job(gpt_job.train, 4, {**shared, "corrupt": corrupt, "settings": {"poison": "skip"}}) as job:
        results = job.wait()
        skipped = job.wait_event("skipped")
        assert job.wait_event("finished")["status"] == 0
        committed = [event["iteration"] for event in job.events if event["event"] == "committed"]
    assert (skipped["iteration"], skipped["microbatch"]) == (2, "1.1")
    assert skipped["error"] == "ValueError: sample 37 is corrupt" and committed == list(range(4))
    with Job(gpt_job.train, 4, {**shared, "plugin": False, "left_out": corrupt}, coordinated=False) as job:
        stock = job.wait()
    living = {rank: result for rank, result in results.items() if result.value is not None}
    assert len(living) == 3, job.where()
    for rank, result in living.items():
        for name, parameter in result.value["parameters"].items():
            assert np.allclose(parameter, stock[rank].value["parameters"][name], rtol=0, atol=1e-6)
        expected = list(stock[rank].value["losses"])
        expected[2] *= 8 / 7  # the mean of those that ran; stock's counts one of nothing
        assert np.allclose(result.value["losses"], expected, rtol=1e-6)


@pytest.mark.night
@pytest.mark.processes
def test_a_script_that_fails_everywhere_while_a_step_is_open_leaves_a_last_checkpoint(tmp_path: Path):
    # The limit on the norm is always exceeded: the second stage's step is undone in the recovery.
    arguments = {"pipelines": 2, "iterations": 4, "clipping": 0.05, "raises": 2,
                 "settings": {"emergency_checkpoint": str(tmp_path)}}
    with Job(gpt_job.train, 4, arguments) as job:
        finished = job.wait_event("finished")
        job.wait()
    assert "have failed alike" in finished["message"], finished
    assert f" is saved in {tmp_path}/global_step" in finished["message"], finished
