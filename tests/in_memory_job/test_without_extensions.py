"""The core stands alone: without any one extension, and without all, a job survives with the same bits."""

from __future__ import annotations

import pytest

from tests.extensions import EACH_GONE, EACH_GONE_OF_WORKERS, only
from tests.in_memory_job.job import Job, Shape, check
from tests.in_memory_job.scenes import SHAPES, Scene
from tests.moments import Moment

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

MOMENTS = [Moment("1:0", "forward", 1, 1), Moment("0:1", "backward", 1, 1), Moment("2:1", "reduce", 1)]


@pytest.mark.every
@pytest.mark.parametrize("left", EACH_GONE)
def test_a_worker_killed_in_a_job_without_some_extension_of_the_coordinator(left):
    """In the middle of an iteration, of which the others keep what they have done. The job saves checkpoints, and does
    not go back to one."""
    with only(left):
        Scene("saves", SHAPES["saves"], [Moment("1:1", "backward", 1, 1)], out={"1:1"}, sure=True).run(seed=1)


@pytest.mark.parametrize("left", EACH_GONE_OF_WORKERS)
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_worker_killed_in_a_job_without_some_extension_of_the_workers(left, moment):
    with only(of_workers=left):
        Scene("3x2", SHAPES["3x2"], [moment], out={moment.worker}, sure=True).run(seed=3)


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_worker_killed_in_a_job_without_any(moment):
    with only([], []):
        Scene("3x2", SHAPES["3x2"], [moment], out={moment.worker}, sure=True).run(seed=5)


@pytest.mark.parametrize("left", EACH_GONE_OF_WORKERS)
def test_a_killed_worker_comes_back_to_a_job_without_some_extension_of_the_workers(left):
    _comes_back_with(only(of_workers=left))


def test_a_killed_worker_comes_back_to_a_job_without_any():
    _comes_back_with(only([], []))


def _comes_back_with(extensions):
    shape, late = Shape(3, 2, 2, 8), Moment("0:0", "forward", 1)
    with extensions, Job(shape, [Moment("1:1", "backward", 0)], holds=[late], seed=4) as job:
        job.comes_back("1:1", late)
        check(job, job.wait(), came={"1:1"})
