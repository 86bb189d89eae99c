"""A healthy worker moves to another stage; it, its second process, or a peer of either may die meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.in_memory_job.job import Job, Moment, Shape, check
from tests.in_memory_job.scenes import operations
from tests.in_memory_job.wires import Asked
from tests.seeds import by_day, seeds

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

SHAPE = Shape(3, 2, 2, 8).with_settings(moves=True)
MOVER, TO = "2:0", "1:1"


def moving(seed: int, *asked: Asked, slow: float = 0.0, holds: Sequence[Moment] = ()) -> Job:
    """It loses `TO` in the first iteration, and `MOVER` had better stand there."""
    return Job(SHAPE, [Moment(TO, "backward", 0, 1)], seed=seed, asked=asked, moves={MOVER: TO}, slow=slow, holds=holds)


@pytest.mark.parametrize("seed", by_day(1, range(2)))
def test_a_worker_moves_to_the_stage_that_has_lost_one(seed: int):
    late = Moment("0:0", "forward", 4)
    job = moving(seed, holds=[late])
    with job:
        job.wait_held(late)
        job.wait_event("waiting", worker=TO)
        job.release(late)
        results = job.wait()
        check(job, results, {MOVER}, {TO})
    mover, = (result for rank, result in results.items() if job.names[rank] == MOVER)
    assert "another process stands for it" in mover.error


@pytest.mark.parametrize("seed", seeds(2))
def test_one_that_has_to_do_with_the_move_dies_at_anything_that_is_asked_of_the_network(seed: int):
    draw = random.Random(seed)
    victim = draw.choice([MOVER, TO, "0:0", "0:1"])
    job = moving(seed, draw.choice(operations(SHAPE)[victim]), slow=0.1)
    with job:
        results = job.wait()
        # Another one may then move, so that no stage is left with a single worker.
        moved = {event["worker"] for event in job.control.events if event["event"] == "moving"}
        came = {event["worker"] for event in job.control.events if event["event"] == "joined"}
        check(job, results, {TO, victim, *moved}, came)
