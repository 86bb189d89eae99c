"""A checkpoint that cannot be written: all workers agree that there is none, and go on."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm.comm import Comm
from megatron_recycle.runtime.saving import NotWritten, Tries
from tests.in_memory_job.job import Disk, Job, Shape, check
from tests.moments import Moment
from tests.seeds import seeds

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one


def told(job: Job, name: str) -> list[dict[str, Any]]:
    return [event for event in job.control.events if event["event"] == name]


def check_agreed(job: Job, results: Any) -> None:
    """All have been told alike which of the checkpoints there are, and it is recorded."""
    full = [iteration in dict(job.shape.full) for iteration in job.shape.save]
    for rank, result in results.items():
        if result.status == 0:
            assert [why is not None for why in result.unsaved] == full, job.processes[rank].name
    assert {*job.disk.named} == {*job.shape.save} - {*dict(job.shape.full)}
    assert {event["iteration"] for event in told(job, "save_failed")} == {one - 1 for one, _ in job.shape.full}


@pytest.mark.parametrize("way", Disk.WAYS)
def test_training_goes_on_without_and_the_next_one_is_written(way: str, caplog: pytest.LogCaptureFixture):
    job = Job(Shape(2, 2, 2, 5, save=(1, 2, 3, 4), full=((2, way), (3, way))))
    results = job.run()
    said = caplog.text
    check(job, results)
    check_agreed(job, results)
    assert len(told(job, "save_failed")) == 2, "once each"
    first = told(job, "save_failed")[0]
    assert first["error"].startswith("no space left on /") and first["error"].endswith("checkpoint /disk/2")
    assert first["workers"] == (4 if way == "all" else 1)
    assert job.disk.cleared == 8
    assert {why for result in results.values() for why in result.unsaved[1:2]} == {first["error"]}
    assert [one.iteration for one in job.control.state.checkpoints] == [0, 3]
    assert said.count("NO CHECKPOINT after iteration 1: no space") == 1 == said.count("after iteration 2: no space")


@pytest.mark.parametrize("seed", seeds(3))
def test_whoever_dies_on_the_way_those_left_and_who_comes_in_are_told_alike(seed: int):
    draw = random.Random(seed)
    shape = Shape(3, 2, 2, 8, save=(1, 2, 3, 4, 5), collect=(2,),
                  full=tuple((iteration, draw.choice(Disk.WAYS)) for iteration in sorted(draw.sample((2, 3, 4), 2))))
    dies = Moment(draw.choice(shape.workers), draw.choice(("save", "saved", "forward", "recovering")), draw.choice(
        (1, 2, 3)))
    late = Moment("2:1" if dies.worker != "2:1" else "1:1", "backward", 4)
    with Job(shape, [dies], holds=[late], seed=seed) as job:
        job.wait_held(late)
        came = [dies.worker] if not job.kills else []
        if came:
            job.comes_back(dies.worker, late)
        else:
            job.release(late)
        results = job.wait()
    check(job, results, came=came)
    check_agreed(job, results)


@pytest.mark.parametrize("dies", [False, True])
def test_it_is_recorded_though_the_first_that_could_not_write_never_knows(dies: bool, monkeypatch: pytest.MonkeyPatch):
    """A failure cuts short the sum that gives the reason: some know it, and go on; that worker does not, or is the one
    that fails."""
    job = Job(Shape(3, 2, 2, 5, save=(1, 2, 3), full=((2, "all"),)),
              [] if dies else [Moment("0:1", "forward", 2)])
    agree, cut = Tries.agree, []

    def cut_short(tries: Tries, comm: Comm) -> None:
        try:
            agree(tries, comm)
        except NotWritten:
            if comm.rank or cut:
                raise
            cut.append(comm)
            if dies:
                job.processes[0].network.die()
            raise GenerationOver("a failure was quicker") from None

    monkeypatch.setattr(Tries, "agree", cut_short)
    results = job.run()
    assert cut and job.control.state.generation > 1, "a failure fell upon it"
    check(job, results, out=["0:0" if dies else "0:1"])
    check_agreed(job, results)
    assert len(told(job, "save_failed")) == 1
    assert told(job, "save_failed")[0]["workers"] == 6


@pytest.mark.parametrize("way", Disk.WAYS)
def test_a_job_that_is_to_end_for_it_says_why(way: str):
    job = Job(Shape(2, 2, 2, 5, save=(1, 2), full=((2, way),)).with_settings(on_failed_save="end"))
    with job:
        results = job.wait()
    (end,) = told(job, "finished")
    assert end["status"] == 1 and "no space left on /" in end["message"], end
    assert "while writing checkpoint /disk/2 (on_failed_save: end)" in end["message"]
    assert all(result.status == 1 for result in results.values())
    assert told(job, "committed")[-1]["iteration"] == 1


def test_a_stage_that_is_lost_goes_back_to_the_last_one_that_is_whole():
    """Not to those after it, however many."""
    shape = Shape(2, 2, 2, 8, save=(2, 3, 4, 5, 6), full=tuple((one, "all") for one in (3, 4, 5, 6)))
    with Job(shape, [Moment("0:1", "forward", 1), Moment("1:1", "backward", 6)]) as job:
        results = job.wait()
        assert all(result.status == 0 for rank, result in results.items() if job.processes[rank].name != "0:1")
    (event,) = told(job, "restored")
    assert event["iteration"] == 1 and {*event["from"].values()} == {"checkpoint"}
