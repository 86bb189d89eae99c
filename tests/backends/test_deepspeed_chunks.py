"""V-shaped stages of a DeepSpeed pipeline: the first half of the layers down the stages, the second half up again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.backends import gpt_job
from tests.backends.comparing import check_survivors
from tests.harness import Hold, Job
from tests.references import calm_run

pytestmark = pytest.mark.processes

PIPELINES, STAGES, ITERATIONS = 3, 2, 8
SIZE = PIPELINES * STAGES
FLAT: Mapping[str, Any] = {"pipelines": PIPELINES, "stages": STAGES, "iterations": ITERATIONS, "dropout": 0.0,
                           "evaluate": [0, 1, 5], "logits": True, "checkpoint": 1, "settings": {"reduction": "exact"},
                           "engine_settings": {"pipeline": {"use_reentrant": False}}}
"""Each stage as DeepSpeed cuts it. No dropout: its numbers are drawn by chunk. Gradients are small enough not to be
clipped. The first evaluation is before anything is trained."""
LIMIT = 90


def bent(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same job with two chunks on each stage."""
    return {**arguments, "settings": {**arguments["settings"], "chunks": 2}}


def rank_of(worker: str) -> int:
    pipeline, stage = map(int, worker.split(":"))
    return stage * PIPELINES + pipeline


def check(job: Job, flat: Mapping[str, Any], but: str = "", late: str = "") -> None:
    """All `but` one ended well, with the losses, the evaluations and the weights of the job ``flat``, bit for bit. One
    that came ``late`` has missed the first evaluation."""
    results, reference = job.wait(), calm_run(gpt_job.train, SIZE, flat)
    found: list[dict[str, numpy.ndarray]] = [{} for _ in range(PIPELINES)]
    for rank in set(range(SIZE)) - ({rank_of(but)} if but else set()):
        assert results[rank].status == 0, job.where()
        value, pipeline = results[rank].value, rank % PIPELINES
        found[pipeline].update(value["parameters"])
        assert value["losses"] == reference[rank].value["losses"]
        # Logits are where the loss is computed: on the last stage, or on the first one, which ends the V.
        mirrored = reference[SIZE - PIPELINES - rank + 2 * pipeline].value["evaluated"]
        missed = len(mirrored) // len(flat["evaluate"]) if late and rank_of(late) == rank else 0
        assert value["evaluated"][missed:] == mirrored[missed:]
    for pipeline, parameters in enumerate(found):
        whole = {name: value for rank in range(pipeline, SIZE, PIPELINES)
                 for name, value in reference[rank].value["parameters"].items()}
        assert parameters.keys() == whole.keys() or but.startswith(f"{pipeline}:")
        assert all(value.tobytes() == whole[name].tobytes() for name, value in parameters.items())
    committed = [event["iteration"] for event in job.events if event["event"] == "committed"]
    assert committed == list(range(ITERATIONS))


@pytest.mark.night
def test_a_killed_worker_is_replaced_and_the_bits_are_those_of_stages_with_one_chunk(tmp_path: Path):
    """Evaluations and checkpoints are made with all workers, and while one is missing."""
    dies, late = Hold("1:1", "backward", 2, 1), Hold("0:0", "forward", 4)
    with Job(gpt_job.train, SIZE, {**bent(FLAT), "save_every": [str(tmp_path), 3]}, [dies, late], limit=LIMIT) as job:
        job.wait_held(dies)
        job.kill(dies)
        job.wait_ended(rank_of("1:1"))
        job.wait_held(late)
        job.rejoin(rank_of("1:1"))
        job.wait_event("waiting", worker="1:1")
        job.release(late)
        check(job, FLAT, late="1:1")


@pytest.mark.night
@pytest.mark.parametrize("arguments", [
    {"bf16": True}, {"engine_settings": {"fp16": {"enabled": True, "initial_scale_power": 6}}},
    {"engine_settings": {"zero_optimization": {"stage": 1}}},
    {"tied": True, "clipping": 0.0}, {"ramp": (2, 4, 4, 6, 1)}, {"loader": "cycle"}, {"optimizer": "SGD"},
    {"blocks": 5}], ids=str)
@pytest.mark.parametrize("step", ["staggered", "barrier"])
def test_bits_of_stages_with_one_chunk_after_the_worker_with_the_loss_was_killed(arguments: dict[str, Any], step: str):
    flat = {**FLAT, **arguments, "settings": {**FLAT["settings"], "step": step}}
    dies = Hold("1:0", "weight", 3, 0)
    with Job(gpt_job.train, SIZE, bent(flat), [dies], limit=LIMIT) as job:
        job.wait_held(dies)
        job.kill(dies)
        check(job, flat, but="1:0")


SAME = {"by hand": {"by_hand": True}, "clipped": {"clipping": 0.05}, "noisy": {"noisy": True},
        "all norms": {"clipping": 0.05, "settings": {"reduction": "exact", "clip_norm": "global"}},
        "follows": {"follows": 1.0, "by_hand": True, "loader": "epochs"},
        "tied": {"tied": True},
        "fp16, overflows": {"engine_settings": {"fp16": {"enabled": True, "initial_scale_power": 6}},
                            "overflows": [(0, 3), (1, 5)]}}
"""Jobs whose bits depend on which layers share a stage."""


@pytest.mark.night
@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("dies", [Hold("2:0", "forward", 3, 1), Hold("0:1", "backward", 2, 2)], ids=str)
def test_bits_of_the_same_job_without_failures(name: str, dies: Hold):
    arguments = bent({**FLAT, "dropout": 0.1, **SAME[name]})
    reference = calm_run(gpt_job.train, SIZE, arguments)
    with Job(gpt_job.train, SIZE, arguments, [dies], limit=LIMIT) as job:
        job.wait_held(dies)
        job.kill(dies)
        check_survivors(job, {dies.worker}, reference)


@pytest.mark.night
def test_layers_of_both_chunks_are_lent_and_the_bits_are_the_same():
    arguments = bent({**FLAT, "dropout": 0.1, "blocks": 6, "settings": {"reduction": "exact", "lend": "auto"}})
    reference, dies = calm_run(gpt_job.train, SIZE, arguments), Hold("1:1", "backward", 1, 1)
    with Job(gpt_job.train, SIZE, {**arguments, "lends": True}, [dies], limit=LIMIT) as job:
        job.wait_held(dies)
        job.kill(dies)
        check_survivors(job, {"1:1"}, reference)
        borrowed = [result.value["borrowed"] for result in job.wait().values() if result.status == 0]
    assert any(borrowed)
