"""The core stands alone: without any one of a worker's extensions, and without all, a job survives with the same bits.

`megatron_recycle.runtime.worker_extensions` is the door.
"""

from __future__ import annotations

import pytest

from megatron_recycle.runtime import worker_extensions as extensions
from tests.memory.job import Job, Shape, check
from tests.memory.scenes import SHAPES, Scene
from tests.moments import Moment

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a death is one

NAMES = [type(each).__name__ for each in extensions.ALL]


@pytest.fixture(params=[*NAMES, "all"])
def gone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The extension that is taken away."""
    left = [each for each in extensions.ALL if request.param not in (type(each).__name__, "all")]
    monkeypatch.setattr(extensions, "ALL", tuple(left))
    return request.param


@pytest.mark.parametrize("moment", [Moment("1:0", "forward", 1, 1), Moment("0:1", "backward", 1, 1),
                                    Moment("2:1", "reduce", 1)], ids=str)
def test_a_killed_worker(gone, moment):
    Scene(f"without {gone}", SHAPES["3x2"], [moment], out={moment.worker}, sure=True).run(seed=3)


def test_a_killed_worker_comes_back(gone):
    shape, late = Shape(3, 2, 2, 8), Moment("0:0", "forward", 1)
    with Job(shape, [Moment("1:1", "backward", 0)], holds=[late], seed=4) as job:
        job.comes_back("1:1", late)
        check(job, job.wait(), came={"1:1"})
