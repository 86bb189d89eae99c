"""The optimizer is cut into shards, each held by some workers of its stage: they die, are replaced, and the bits stay.

The job is in memory, see `tests.memory.job`.
"""

from __future__ import annotations

import pytest

from tests.memory.job import Shape, undisturbed
from tests.memory.scenes import PER_MICROBATCH, PHASES, Scene
from tests.moments import Moment

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

SHAPE = Shape(3, 2, 2, 3, sharded=True).with_settings(step="barrier")
WHOLE = Shape(3, 2, 2, 3).with_settings(step="barrier")


def test_without_failures_the_model_is_the_one_of_a_whole_optimizer():
    sharded, whole = undisturbed(SHAPE), undisturbed(WHOLE)
    for rank, result in sharded.items():
        assert result.losses == whole[rank].losses
        for name, tensor in result.state.items():
            assert tensor.equal(whole[rank].state[name]), name
        assert len(result.shards) == 2


@pytest.mark.parametrize("phase", PHASES)
def test_each_worker_killed_at_each_moment(phase):
    for number, worker in enumerate(SHAPE.workers):
        iteration = (PHASES.index(phase) + number) % SHAPE.iterations
        nth = number % SHAPE.microbatches if phase in PER_MICROBATCH else 0
        Scene("shards", SHAPE, [Moment(worker, phase, iteration, nth)], out={worker}, sure=True).run(seed=number)


CLIPPED = Shape(4, 2, 2, 4, sharded=True, clipping=0.05, evaluate=(1, 2), save=(2,)).with_settings(step="barrier")
TIED = Shape(3, 2, 2, 3, sharded=True, tied=True).with_settings(step="barrier", state_copies=3)
HOSTS = tuple((f"{pipeline}:{stage}", str(pipeline // 2)) for pipeline in range(4) for stage in range(2))


@pytest.mark.parametrize("turn", range(4))
def test_two_that_die_one_after_the_other(turn):
    """Also twins of each other: what the first has held is adopted before the second dies."""
    other = (turn + 1 + turn // 2) % 4
    stage = turn % 2
    kills = [Moment(f"{turn}:{stage}", "backward", 1), Moment(f"{other}:{stage}", "reduced", 2)]
    Scene("one after the other", CLIPPED, kills, out={kill.worker for kill in kills}, sure=True).run(seed=turn)


@pytest.mark.parametrize("seed", range(2))
def test_a_shared_parameter(seed):
    for worker in TIED.workers:
        Scene("tied", TIED, [Moment(worker, PHASES[seed + 3], 1)], out={worker}, sure=True).run(seed=seed)
