"""Jobs on Transformer Engine's layers: as core's own schedule trains them, and through a SIGKILL and a return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.backends.comparing import check_survivors, differences
from tests.harness import Hold
from tests.te.job import TEJob, calm, stock
from tests.te.versions import engines, newest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.processes

PIPELINES, STAGES, ITERATIONS, KILLED_IN = 2, 2, 4, 1
MOMENTS = ("--distributed-optimizer", "--moments", "bf16")
FP8 = ("--bf16", "--width", "32", "--length", "16", "--fp8")
"""Products in 8 bits, of sizes that they can have; a recipe follows."""
FUSED = {"fused": True}
"""Weight gradients are added to `main_grad` in the kernel that forms them, as is Megatron's default."""


def job_of(*options: str, reduction: str = "exact", **more: Any) -> dict[str, Any]:
    """Tied embeddings, Adam, clipping and dropout are the script's defaults."""
    return {"pipelines": PIPELINES, "stages": STAGES, "iterations": ITERATIONS, "options": options,
            "settings": {"reduction": reduction}, **more}


@engines
@pytest.mark.night
@pytest.mark.parametrize(("options", "more"), [
    (("--bf16",), FUSED),
    ((), {}), (("--bf16",), {}), ((), FUSED), (("--bf16", "--recompute", "full"), FUSED),
    (("--bf16", "--clip", "0", "--untied"), {"tensor": 2, **FUSED}),
    (("--bf16", "--qk-layernorm", "--clip", "0", "--untied"), {"tensor": 2, **FUSED}),
    (("--bf16", "--sequence-parallel", "--clip", "0", "--untied"), {"tensor": 2, **FUSED}),
    (("--sequence-parallel", "--qk-layernorm", "--clip", "0", "--untied"), {"tensor": 2, **FUSED}),
    (("--fp16", "--initial-loss-scale", "1024"), FUSED),
    (("--bf16", "--untied"), {"stages": 1, **FUSED}),
    ((*FP8, "tensorwise"), {}), ((*FP8, "blockwise"), FUSED), ((*FP8, "mxfp8", "--recompute", "full"), FUSED),
    ((*FP8, "tensorwise", "--sequence-parallel", "--clip", "0", "--untied"), {"tensor": 2, **FUSED})], ids=str)
def test_without_failures_parameters_have_the_bits_of_core_s_own_schedule(
        engine: Path, options: tuple[str, ...], more: dict[str, Any]):
    size = PIPELINES * more.get("stages", STAGES) * more.get("tensor", 1)
    arguments = job_of("--dropout", "0", *options, **more)
    theirs, ours = stock(engine, size, arguments), calm(engine, size, {**arguments, "settings": {}})
    for rank in theirs:
        found = differences(theirs[rank], ours[rank])
        assert found.pop("losses", 0.0) < 1e-5  # of the sums over the global batch, for the log
        assert not found


@newest
@pytest.mark.night
@pytest.mark.parametrize("options", [
    MOMENTS, ("--distributed-optimizer", "--moments", "fp32"), (*MOMENTS, "--grad-reduce-in-bf16"),
    (*FP8, "tensorwise", *MOMENTS)], ids=str)
def test_a_precision_aware_optimizer_makes_the_parameters_and_moments_of_core_s_own_schedule(
        engine: Path, options: tuple[str, ...]):
    arguments = job_of("--bf16", "--dropout", "0", "--clip", "0", *options, **FUSED)
    size = PIPELINES * STAGES
    theirs, ours = stock(engine, size, arguments), calm(engine, size, {**arguments, "settings": {}})
    for rank in theirs:
        assert not [name for name, value in theirs[rank].value["parameters"].items()
                    if value.tobytes() != ours[rank].value["parameters"][name].tobytes()]
        moments = [{(key, value.tobytes()) for state in results[rank].value["state"] for key, value in state.items()
                    if key in ("exp_avg", "exp_avg_sq")} for results in (theirs, ours)]
        assert moments[0] and moments[0] <= moments[1]


@engines
@pytest.mark.night
def test_a_worker_killed_in_mid_iteration_leaves_the_same_bits(engine: Path):
    arguments = job_of("--bf16", **FUSED)
    undisturbed = calm(engine, PIPELINES * STAGES, arguments)
    hold = Hold("1:1", "backward", KILLED_IN, 1)
    with TEJob(engine, PIPELINES * STAGES, arguments, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {"1:1"}, undisturbed)


@newest
@pytest.mark.night
@pytest.mark.parametrize(("options", "settings", "hold"), [
    ((*FP8, "tensorwise"), {}, Hold("1:1", "backward", KILLED_IN, 1)),
    ((*FP8, "blockwise", "--interleave", "2"), {}, Hold("0:1", "backward", KILLED_IN, 2)),
    ((*FP8, "mxfp8", "--recompute", "full", "--distributed-optimizer", "--clip", "0.05"), {"step": "staggered"},
     Hold("1:0", "stepped", KILLED_IN)),
    ((), {}, Hold("0:0", "forward", KILLED_IN, 2)),
    (("--bf16", "--recompute", "full"), {}, Hold("0:1", "backward", KILLED_IN, 2)),
    # A step that was made on a guess is undone, with the optimizer's own count of steps.
    (("--bf16", "--clip", "0.05"), {"step": "staggered"}, Hold("1:0", "stepped", KILLED_IN)),
    (("--bf16", "--distributed-optimizer", "--clip", "0.05"), {"step": "staggered"},
     Hold("1:0", "stepped", KILLED_IN)),
    (("--bf16", *MOMENTS, "--clip", "0.05"), {"step": "staggered"}, Hold("1:0", "stepped", KILLED_IN)),
    (("--bf16", "--interleave", "2"), {}, Hold("1:1", "backward", KILLED_IN, 3)),
    (("--fp16", "--initial-loss-scale", "1024"), {}, Hold("1:1", "backward", KILLED_IN, 2)),
    (("--bf16", "--qk-layernorm"), {}, Hold("0:1", "backward", KILLED_IN, 2))], ids=str)
def test_the_same_bits_with(engine: Path, options: tuple[str, ...], settings: dict[str, Any], hold: Hold):
    arguments = job_of(*options, **FUSED)
    arguments["settings"] |= settings
    undisturbed = calm(engine, PIPELINES * STAGES, arguments)
    with TEJob(engine, PIPELINES * STAGES, arguments, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {hold.worker}, undisturbed)


@newest
@pytest.mark.night
def test_a_peer_takes_over_in_pipelines_of_one_stage(engine: Path):
    arguments = job_of("--bf16", **{**FUSED, "stages": 1})
    undisturbed = calm(engine, PIPELINES, arguments)
    hold = Hold("1:0", "backward", KILLED_IN, 2)
    with TEJob(engine, PIPELINES, arguments, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {"1:0"}, undisturbed)


@newest
@pytest.mark.night
def test_with_the_fast_reduction_results_agree_to_rounding(engine: Path):
    arguments = job_of("--optimizer", "sgd", "--lr", "0.1", reduction="fast", **FUSED)
    undisturbed = calm(engine, PIPELINES * STAGES, arguments)
    hold = Hold("1:0", "backward", KILLED_IN, 2)
    with TEJob(engine, PIPELINES * STAGES, arguments, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {"1:0"}, undisturbed, within=1e-5)


@newest
@pytest.mark.night
@pytest.mark.parametrize("options", [
    (), ("--sequence-parallel", "--qk-layernorm"), (*FP8, "tensorwise", "--sequence-parallel")], ids=str)
def test_one_process_of_a_tensor_parallel_worker_killed_leaves_the_same_bits(engine: Path, options: tuple[str, ...]):
    """The layers' own handles of the group are the new generation's, and those of what makes tensors of 8 bits."""
    arguments = job_of("--bf16", "--clip", "0", *options, tensor=2, **FUSED)
    undisturbed = calm(engine, 8, arguments)
    hold = Hold("1:0.1", "backward", KILLED_IN, 1)
    with TEJob(engine, 8, arguments, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        results = job.wait()
        ranks = job.wait_event("started")["ranks"]
    gone = {ranks["1:0.0"], ranks["1:0.1"]}
    for rank in set(ranks.values()) - gone:
        assert not differences(results[rank], undisturbed[rank])


@newest
@pytest.mark.timeout(200)
@pytest.mark.parametrize("options", [pytest.param(("--bf16",), marks=pytest.mark.night), (*FP8, "tensorwise")], ids=str)
def test_a_killed_worker_comes_back_and_all_end_with_the_same_bits(engine: Path, options: tuple[str, ...]):
    """Peers compare all they hold in every iteration; its layers start with none of theirs behind them."""
    arguments = {**job_of(*options, **FUSED), "iterations": 7}
    arguments["settings"] |= {"verify": "peers"}
    undisturbed = calm(engine, PIPELINES * STAGES, arguments)
    dies, late = Hold("1:1", "backward", KILLED_IN, 1), Hold("0:0", "forward", KILLED_IN + 2)
    rank = next(rank for rank, result in undisturbed.items()
                if (result.value["pipeline"], result.value["stage"]) == (1, 1))
    with TEJob(engine, PIPELINES * STAGES, arguments, [dies, late], limit=150) as job:
        job.comes_back(dies, late, rank)
        results = job.wait()
        for own, result in results.items():
            assert result.status == 0, job.where()
            assert len(result.value["members"]) == PIPELINES * STAGES
            assert not differences(result, undisturbed[own])


@newest
@pytest.mark.night
def test_whoever_runs_a_lent_layer_the_bits_are_the_same(engine: Path):
    """Copies of layers that are built meanwhile defer too, each into the sums of whoever lends it."""
    arguments = {**job_of("--bf16", **FUSED), "pipelines": 3}
    arguments["settings"] |= {"lend": "auto"}
    undisturbed = calm(engine, 3 * STAGES, arguments)
    hold = Hold("1:1", "backward", KILLED_IN, 1)
    with TEJob(engine, 3 * STAGES, {**arguments, "lends": True}, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {"1:1"}, undisturbed)
    assert any(result.value["borrowed"] for result in job.results.values() if result.value)
