"""V-shaped stages of a DeepSpeed pipeline: the first half of the layers down the stages, the second half up again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.backends import gpt_job
from tests.harness import Hold, Job, Result
from tests.references import calm_run

pytestmark = pytest.mark.processes

PIPELINES, STAGES, ITERATIONS = 3, 2, 8
SIZE = PIPELINES * STAGES
FLAT: Mapping[str, Any] = {"pipelines": PIPELINES, "stages": STAGES, "iterations": ITERATIONS, "dropout": 0.0,
                           "evaluate": [1, 5], "checkpoint": 1, "settings": {"reduction": "exact"},
                           "engine_settings": {"pipeline": {"use_reentrant": False}}}
"""Each stage as DeepSpeed cuts it. No dropout: its numbers are drawn by chunk."""
BENT: Mapping[str, Any] = {**FLAT, "settings": {"reduction": "exact", "chunks": 2}}
LIMIT = 90


def rank_of(worker: str) -> int:
    pipeline, stage = map(int, worker.split(":"))
    return stage * PIPELINES + pipeline


def by_pipeline(results: Mapping[int, Result]) -> list[dict[str, numpy.ndarray]]:
    """All parameters of each pipeline, whichever of its stages holds them."""
    found: list[dict[str, numpy.ndarray]] = [{} for _ in range(PIPELINES)]
    for result in results.values():
        if result.status == 0:
            found[result.value["pipeline"]].update(result.value["parameters"])
    return found


def check(job: Job, but: str = "") -> None:
    """All but one ended well, with the losses, the evaluations and the weights of the job whose stages have one chunk
    each, bit for bit."""
    results, reference = job.wait(), calm_run(gpt_job.train, SIZE, FLAT)
    live = set(range(SIZE)) - ({rank_of(but)} if but else set())
    for rank in live:
        assert results[rank].status == 0, job.where()
        for key in ("losses", "evaluated"):
            assert results[rank].value[key] == reference[0].value[key]
    whole = by_pipeline(reference)[0]
    for pipeline, parameters in enumerate(by_pipeline({rank: results[rank] for rank in live})):
        assert parameters.keys() == whole.keys() or str(pipeline) == but.partition(":")[0]
        assert all(value.tobytes() == whole[name].tobytes() for name, value in parameters.items())
    committed = [event["iteration"] for event in job.events if event["event"] == "committed"]
    assert committed == list(range(ITERATIONS))


def test_a_killed_worker_is_replaced_and_the_bits_are_those_of_stages_with_one_chunk(tmp_path: Path):
    """Evaluations and checkpoints are made with all workers, and while one is missing."""
    dies, late = Hold("1:1", "backward", 2, 1), Hold("0:0", "forward", 4)
    with Job(gpt_job.train, SIZE, {**BENT, "save_every": [str(tmp_path), 3]}, [dies, late], limit=LIMIT) as job:
        job.wait_held(dies)
        job.kill(dies)
        job.wait_ended(rank_of("1:1"))
        job.wait_held(late)
        job.rejoin(rank_of("1:1"))
        job.wait_event("waiting", worker="1:1")
        job.release(late)
        check(job)
