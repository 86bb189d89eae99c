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


@pytest.mark.night
@pytest.mark.processes
@pytest.mark.parametrize(("pipelines", "stages", "tensor", "options"), [
    (3, 2, 1, ("--recompute", "full")), (2, 3, 1, ("--blocks", "9", "--distributed-optimizer", "--bf16")),
    (3, 2, 1, ("--recompute", "selective", "--untied", "--per-token-loss", "--distributed-optimizer")),
    (2, 2, 2, ("--recompute", "full")), (3, 2, 1, ("--bf16",))])
def test_whoever_runs_a_layer_the_bits_are_the_same(pipelines, stages, tensor, options):
    fused = options == ("--bf16",)  # what the kernel adds in a helper is the owner's, as it would have been at home
    job = {"pipelines": pipelines, "stages": stages, "tensor": tensor, "iterations": 4, "options": options,
           "settings": SETTINGS, "fused": fused}
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
    assert all(bool(result.value["fused"]) == fused for result in ended.values())
    committed = [event["iteration"] for event in lending.events if event["event"] == "committed"]
    assert committed == list(range(4))


@pytest.mark.night
@pytest.mark.processes
@pytest.mark.timeout(200)
@pytest.mark.parametrize("options", [(), ("--distributed-optimizer", "--bf16")])
def test_the_planner_lends_layers_until_the_worker_is_back(options):
    """With costs that are given, so that the plan does not depend on how busy the machine is."""
    job = {"pipelines": 3, "stages": 2, "iterations": 13, "options": ("--blocks", "6", *options), "settings": SETTINGS}
    reference = calm_run(megatron_job.train, 6, job)
    planning = {"costs": "200,220,180", "planner_budget": 0.5, "horizon": 1e6}
    dies, late, back = Hold("1:1", "backward", 1, 1), Hold("0:0", "forward", 3), Hold("0:0", "forward", 9)
    with Job(megatron_job.train, 6, {**job, "settings": {**SETTINGS, **planning}}, [dies, late, back],
             limit=150) as lending:
        lending.wait_held(dies)
        lending.kill(dies)
        lending.wait_held(late)
        lending.wait_until(lambda: any("lending" in event for event in lending.events), "a plan that lends")
        lends = next(event["digest"] for event in lending.events if "lending" in event)
        lending.release(late)
        lending.wait_held(back)
        lending.wait_event("adopted", digest=lends)
        lending.rejoin(4)
        lending.wait_event("waiting", worker="1:1")
        lending.release(back)
        lending.wait_event("joined", worker="1:1")
        results = lending.wait()
    assert all(result.status == 0 and not result.value["borrowed"] for result in results.values()), lending.where()
    if "--distributed-optimizer" in options:
        check(results, reference)
    else:
        assert not any(differences(result, reference[rank]) for rank, result in results.items())
    assert [event["iteration"] for event in lending.events if event["event"] == "committed"] == list(range(13))
