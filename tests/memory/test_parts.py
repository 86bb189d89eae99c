"""Workers of two parts (tensor parallelism): one that dies takes its worker out, and the others end with the same
bits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.memory.job import Job, Moment, Shape, check
from tests.memory.scenes import PHASES
from tests.memory.wires import Asked
from tests.seeds import seeds

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

SHAPE = Shape(2, 2, 2, 3, parts=2)
SHAPES = [SHAPE, replace(SHAPE, clipping=0.05), replace(SHAPE, stages=3, microbatches=3),
          SHAPE.with_settings(step="barrier")]
PROCESSES = [f"{worker}.{part}" for worker in SHAPE.workers for part in range(2)]


def ends_well(shape: Shape, worker: str, seed: int, kills: list[Moment], asked: list[Asked]) -> None:
    job = Job(shape, kills, asked=asked, seed=seed, slow=0.1)
    with job:
        check(job, job.wait(), {f"{worker}.0", f"{worker}.1"})


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.night) for turn in range(1, len(PHASES)))])
def test_each_part_killed_at_some_moment_and_by_night_at_each(turn: int):
    for number, name in enumerate(PROCESSES):
        phase = PHASES[(number + turn) % len(PHASES)]
        ends_well(SHAPE, name[:3], number, [Moment(name, phase, 1)], [])


@pytest.mark.parametrize("seed", seeds(6))
def test_random_campaign(seed: int):
    """At anything that is asked of the network: a collective of the parts, a reduction, a roll-back."""
    draw = random.Random(seed)
    shape = draw.choice(SHAPES)
    calm = Job(shape, seed=1)
    calm.run()
    one = draw.choice(calm.deaths.all())
    ends_well(shape, one.worker[:3], seed, [], [one])
