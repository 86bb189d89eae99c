"""The script's own collectives in real jobs."""

from __future__ import annotations

import pytest

from tests.backends import groups_job
from tests.backends.comparing import differences
from tests.harness import Hold, Job
from tests.references import calm_run

SIZE = 4


@pytest.mark.processes
@pytest.mark.timeout(150)
def test_a_worker_dies_in_a_collective_of_the_script_and_comes_back():
    """The others end the call, and all that follow, with the bits of a run without failures; a worker that comes in is
    told what those before it brought, and takes part in those after it."""
    calm = calm_run(groups_job.train, SIZE, {})
    dies, late = Hold("1:0", "collective", 1, 2), Hold("0:0", "forward", 2)
    with Job(groups_job.train, SIZE, {}, [dies, late]) as job:
        job.wait_held(dies)
        job.kill(dies)
        job.wait_ended(2)
        job.wait_held(late)
        job.rejoin(2)
        job.wait_event("waiting", worker="1:0")
        job.release(late)
        results = job.wait()
        for rank, result in results.items():
            assert result.status == 0, job.where()
            found = differences(result, calm[rank])
            assert not found, (rank, found)
            assert result.value["called"] == calm[rank].value["called"], rank
            assert result.value["secrets"] == results[0].value["secrets"], rank
