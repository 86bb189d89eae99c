"""A stage of a Megatron job has lost two workers, and a healthy one of the other stage moves there: the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.backends import megatron_job
from tests.backends.comparing import differences
from tests.harness import Hold, Job
from tests.references import calm_run

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.processes, pytest.mark.night, pytest.mark.timeout(200)]

PIPELINES, STAGES, ITERATIONS, KILLED_IN = 3, 2, 12, 1
EXACT: Mapping[str, Any] = {"pipelines": PIPELINES, "stages": STAGES, "iterations": ITERATIONS,
                            "settings": {"reduction": "exact", "verify": "peers", "moves": True}}
DIE = Hold("0:0", "backward", KILLED_IN), Hold("1:0", "backward", KILLED_IN)
LATE = Hold("2:1", "forward", KILLED_IN + 2)


def test_a_healthy_worker_moves_to_the_stage_that_lost_two():
    """From the last stage to the first, which share tied embeddings."""
    reference = calm_run(megatron_job.train, PIPELINES * STAGES, EXACT)
    ranks = {f"{result.value['pipeline']}:{result.value['stage']}": rank for rank, result in reference.items()}
    with Job(megatron_job.train, PIPELINES * STAGES, EXACT, [*DIE, LATE], limit=150) as job:
        job.wait_held(*DIE)
        job.kill(*DIE)
        for hold in DIE:
            job.wait_ended(ranks[hold.worker])
        moving = job.wait_event("moving")
        mover, to = moving["worker"], moving["to"]
        assert (mover, to, moving["to_rank"]) == ("1:1", "0:0", ranks["0:0"])
        job.wait_held(LATE)
        job.rejoin(ranks[to])
        job.wait_event("waiting", worker=to)
        job.release(LATE)
        assert job.wait_event("joined", worker=to)["moved_from"] == mover
        assert job.wait_event("left", kind="move")["worker"] == mover
        assert job.wait_ended(ranks[mover]).status == 0, job.where()
        results = job.wait()
        for name, rank in ranks.items():
            if name in (mover, "1:0"):
                continue
            assert results[rank].status == 0, job.where()
            assert len(results[rank].value["members"]) == 4
            found = differences(results[rank], reference[rank])
            assert not found, (name, found)
        assert [e["iteration"] for e in job.events if e["event"] == "committed"] == list(range(ITERATIONS))
