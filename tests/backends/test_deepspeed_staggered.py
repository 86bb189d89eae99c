"""Stages that step before they know the others' gradient norms end with the bits of stages that wait for them.

Cases cover pipelines, stages, clipping, the moment and the place of the kill pairwise, not as a product.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_recycle.backends.deepspeed.running import Running
from megatron_recycle.errors import UnsupportedError
from tests.backends import gpt_job
from tests.backends.comparing import check_survivors, differences
from tests.harness import Hold, Job, Result
from tests.references import calm_run

ALWAYS = 0.05
"""A limit on the gradient norm below every norm that occurs: each early step is wrong and has to be undone."""


def arguments(pipelines: int, stages: int, clipping: float, step: str = "staggered",
              reduction: str = "exact") -> dict[str, Any]:
    """Of a job. With `fast` a step may be undone when the script goes on already."""
    return {"pipelines": pipelines, "stages": stages, "iterations": 5, "clipping": clipping,
            "settings": {"reduction": reduction, "step": step}}


def waiting(pipelines: int, stages: int, clipping: float, reduction: str = "exact") -> dict[int, Result]:
    """The job without failures whose stages wait for each other."""
    return calm_run(gpt_job.train, pipelines * stages, arguments(pipelines, stages, clipping, "barrier", reduction))


@pytest.mark.processes
@pytest.mark.night
def test_steps_undone_in_every_iteration_leave_the_bits_of_waiting():
    key = (3, 2, ALWAYS)
    calm = waiting(*key, reduction="fast")
    with Job(gpt_job.train, 6, arguments(*key, reduction="fast")) as job:
        results = job.wait()
    for rank, result in results.items():
        assert differences(result, calm[rank]) == {}
    undone = {event["iteration"] for event in job.events if event["event"] == "rolled_back"}
    assert undone == {0, 1, 2}, "three wrong steps in a row make the stages wait"


@pytest.mark.processes
@pytest.mark.night
def test_a_worker_killed_while_stages_are_a_step_apart():
    """And every step is wrong. All other moments: tests/in_memory_job."""
    key, hold = (2, 4, ALWAYS), Hold("1:1", "step", 1)
    with Job(gpt_job.train, 8, arguments(*key), [hold]) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {hold.worker}, waiting(*key))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.night
@pytest.mark.parametrize(("tied", "bf16", "stages", "clipping", "hold"), [
    (False, True, 2, 0.0, Hold("1:1", "weight", 2, 2)),
    (True, True, 3, ALWAYS, Hold("1:0", "stepped", 1)),
], ids=str)
def test_tied_weights_and_bf16(tied, bf16, stages, clipping, hold):
    options = {"tied": tied, "bf16": bf16}
    calm = calm_run(gpt_job.train, 2 * stages, {**arguments(2, stages, clipping, "barrier"), **options})
    with Job(gpt_job.train, 2 * stages, {**arguments(2, stages, clipping), **options}, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {hold.worker}, calm)
    if tied:
        first, last = (next(calm[rank].value["parameters"][name] for rank in ranks
                            for name in calm[rank].value["parameters"] if "token.weight" in name)
                       for ranks in ([0], [2 * stages - 1]))
        assert (first == last).all()


@pytest.mark.processes
@pytest.mark.slow
def test_recomputed_activations_have_the_randomness_of_their_own_forward():
    """With DeepSpeed's activation checkpointing, whose recomputation runs inside B, guests included."""
    options = {**arguments(2, 2, 0.0), "iterations": 3, "checkpoint": 1, "dropout": 0.3}
    hold = Hold("0:1", "weight", 1, 1)
    calm = calm_run(gpt_job.train, 4, options)
    with Job(gpt_job.train, 4, options, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {hold.worker}, calm)


ZERO = {"engine_settings": {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
                            "steps_per_print": 1000}}


@pytest.mark.processes
@pytest.mark.night
@pytest.mark.parametrize(("reduction", "kind", "within"), [
    ("exact", {**ZERO, "ramp": (4, 4, 2)}, 0.0), ("exact", {"ramp": (4, 4, 6)}, 0.0), ("fast", {}, 1e-4),
    ("exact", {}, 0.0), ("exact", ZERO, 0.0), ("fast", {**ZERO, "clipping": ALWAYS}, 1e-4)], ids=str)
def test_an_iteration_that_is_run_again_has_the_scripts_variables_of_then(reduction, kind, within):
    """The last stage has returned from it, and the script anneals the loss for the next one, when a worker of the first
    stage is killed and nobody holds that stage's gradient. Also where its batch is another one than at the start, and
    where each worker has some of the gradient."""
    options = {**arguments(2, 2, 0.0, reduction=reduction), "annealed": True, **kind}
    calm = calm_run(gpt_job.train, 4, options)
    dies, goes_on = Hold("0:0", "reduce", 2), Hold("0:1", "annealed", 3)
    with Job(gpt_job.train, 4, options, [dies, goes_on]) as job:
        job.wait_held()
        job.kill(dies)
        job.release(goes_on)
        check_survivors(job, {dies.worker}, calm, within=within)
        (went,) = [event for event in job.events if event["event"] == "reconciled"]
        assert went["target"] == 1 and went["redone"] == 0
    assert not [event for event in job.events if event["event"] == "repeated"]


@pytest.mark.processes
def test_compiled_layers():
    options = {**arguments(2, 2, 0.0), "iterations": 3}
    hold = Hold("1:0", "backward", 1, 1)
    calm = calm_run(gpt_job.train, 4, options)
    with Job(gpt_job.train, 4, {**options, "compiled": True}, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {hold.worker}, calm)


def test_a_first_stage_that_its_checkpoints_would_leave_untrained_is_refused():
    """Tokens have no gradient, so that a reentrant checkpoint of the embedding gives none. Stock fails in B."""
    embedding = nn.Embedding(3, 2)
    module = nn.Module()
    module.forward_funcs, module.forward = [embedding], lambda x: embedding(x).detach()
    engine = SimpleNamespace(module=module, is_last_stage=lambda: False, batch_fn=None,
                             has_attention_mask=False, has_bool_tensors=False)
    running = SimpleNamespace(_engine=engine, _trains=lambda: True, _load=lambda data: (data,), _last=False)
    with pytest.raises(UnsupportedError, match="checkpointable_layers"):
        Running._forward(running, None, (torch.tensor([1]), torch.tensor([1])))
