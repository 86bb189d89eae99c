"""Layers of a Megatron stage that a neighbouring stage's workers run, as crossings that are given by hand say."""

from __future__ import annotations

import pytest

from tests.backends import megatron_job
from tests.backends.comparing import differences
from tests.backends.test_megatron_distributed import check
from tests.harness import Hold, Job
from tests.references import calm_run

pytest.importorskip("megatron.core")

SETTINGS = {"reduction": "exact", "lend": "auto"}
"""Tied embeddings, Adam, clipping and dropout are the script's defaults."""


@pytest.mark.processes
@pytest.mark.parametrize(("pipelines", "stages", "tensor", "options"), [
    (3, 2, 1, ("--recompute", "full")),
    *[pytest.param(*case, marks=pytest.mark.night) for case in [
        (2, 3, 1, ("--blocks", "9", "--distributed-optimizer", "--bf16")),
        (3, 2, 1, ("--recompute", "selective", "--untied", "--per-token-loss", "--distributed-optimizer")),
        (2, 2, 2, ("--recompute", "full"))]]])
def test_whoever_runs_a_layer_the_bits_are_the_same(pipelines, stages, tensor, options):
    job = {"pipelines": pipelines, "stages": stages, "tensor": tensor, "iterations": 4, "options": options,
           "settings": SETTINGS}
    processes = pipelines * stages * tensor
    reference = calm_run(megatron_job.train, processes, job)
    dies = Hold("1:1" if tensor == 1 else "1:1.1", "backward", 1, 1)
    with Job(megatron_job.train, processes, {**job, "lends": True}, [dies]) as lending:
        lending.wait_held()
        lending.kill(dies)
        results = lending.wait()
    # A part that is left alone has no work, and ends when the job does.
    ended = {rank: result for rank, result in results.items() if result.status == 0 and result.value}
    assert len(ended) == processes - tensor, lending.where()
    if "--distributed-optimizer" in options:
        check(ended, reference)  # shards are not where they were
    else:
        assert not any(differences(result, reference[rank]) for rank, result in ended.items())
    assert any(result.value["borrowed"] for result in ended.values())
    assert not any(result.value["borrowed"] for result in reference.values())
    committed = [event["iteration"] for event in lending.events if event["event"] == "committed"]
    assert committed == list(range(4))
