"""What a script keeps beside the model comes to a worker that comes in, as its peers have it at that place."""

from __future__ import annotations

import random

import pytest

from tests.in_memory_job.job import Job, Shape, check, differences, undisturbed
from tests.moments import Moment
from tests.seeds import seeds

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one


@pytest.mark.parametrize("seed", seeds(2))
def test_who_comes_in_has_its_peers_average_whatever_fails_on_the_way(seed: int):
    """Another one may die while it comes in, or right after; calls of all kinds lie in between."""
    draw = random.Random(seed)
    shape = Shape(3, 2, 2, 8, average=True, save=(3, 5), evaluate=(2, 5, 6), collect=(4,))
    gone = draw.choice(shape.workers)
    pipeline, stage = map(int, gone.split(":"))
    peer, late = f"{(pipeline + 1) % 3}:{stage}", Moment(f"{(pipeline + 1) % 3}:{1 - stage}", "backward", 3)
    dies = Moment(peer, draw.choice(("forward", "backward", "step", "joining", "recovering")), draw.choice((4, 5)))
    with Job(shape, [Moment(gone, draw.choice(("forward", "backward", "reduce")), 1), dies], holds=[late],
             seed=seed) as job:
        job.comes_back(gone, late)
        results = job.wait()
    check(job, results, out=[peer], came=[gone])


@pytest.mark.parametrize("phase", ["backward", "reduce"])
def test_who_comes_in_when_all_go_back_gets_it_once_its_script_is_where_its_peers_is(phase: str):
    """The iterations in between are made again with the new worker, whose script still has to go through them: what its
    peer's has made of them by then comes too early."""
    shape = Shape(2, 2, 2, 9, average=True, save=(3, 5, 7), evaluate=(4, 6)).with_settings(
        guard="memory", guard_interval=3)
    late = Moment("1:0", "backward", 3)
    kills = [Moment("0:0", "forward", 1), Moment("0:1", "forward", 2), Moment("1:1", phase, 4)]
    with Job(shape, kills, holds=[late]) as job:
        job.comes_back("0:0", late)
        results = job.wait()
    (restored,) = [event for event in job.control.events if event["event"] == "restored"]
    assert restored["lost"] > 0
    reference = undisturbed(shape.with_settings(step="barrier"))
    for rank in (0, 1):
        assert results[rank].status == 0, job.where()
        assert not differences(results[rank], reference[rank]) - {"losses", "evaluated"}, job.where()


@pytest.mark.parametrize("phase", ["forward", "save", "evaluate"])
def test_where_a_whole_stage_is_new_nobody_has_it_and_an_error_line_says_so(
    phase: str, caplog: pytest.LogCaptureFixture
):
    """The others, which go back, keep theirs: their scripts have been through those iterations."""
    shape = Shape(1, 2, 2, 7, average=True, save=(3, 5), evaluate=(3, 5)).with_settings(
        guard="memory", guard_interval=3)
    with Job(shape, [Moment("0:1", phase, 5 if phase == "forward" else 4)]) as job:
        results = job.wait()
    reference = undisturbed(shape.with_settings(step="barrier"))
    assert {results[0].status, results[1].status} == {0}, job.where()
    assert not differences(results[0], reference[0])
    assert {name.split()[0] for name in differences(results[1], reference[1]) - {"losses", "evaluated"}} == {"average"}
    assert caplog.text.count("REGISTERED STATE IS LOST") == 1 and "had registered (average)" in caplog.text
