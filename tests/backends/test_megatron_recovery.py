"""Workers of a Megatron job are killed at chosen moments; training goes on and ends with the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.backends import megatron_job
from tests.backends.comparing import check_survivors, differences
from tests.harness import Hold, Job, Result
from tests.references import calm_run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.processes

PIPELINES, STAGES, ITERATIONS, KILLED_IN = 3, 2, 4, 1
WORKERS = PIPELINES * STAGES
EXACT: Mapping[str, Any] = {"pipelines": PIPELINES, "stages": STAGES, "iterations": ITERATIONS,
                            "settings": {"reduction": "exact"}}
"""Tied embeddings, Adam, clipping and dropout are the script's defaults."""


def job_of(*options: str, **settings: Any) -> Mapping[str, Any]:
    return {**EXACT, "options": options, "settings": {**EXACT["settings"], **settings}}


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Result]:
    """The exact job without failures."""
    return calm_run(megatron_job.train, WORKERS, EXACT)


def kill_and_compare(holds: list[Hold], reference: Mapping[int, Result], arguments: Mapping[str, Any] = EXACT,
                     within: float = 0.0) -> Job:
    with Job(megatron_job.train, WORKERS, arguments, holds) as job:
        job.wait_held()
        job.kill(*holds)
        check_survivors(job, {hold.worker for hold in holds}, reference, within)
    for rank, result in job.results.items():
        if result.status == 0 and not within:
            assert [result.value[key] for key in ("norms", "zeros")] == [
                reference[rank].value[key] for key in ("norms", "zeros")]
    return job


def test_a_worker_killed_in_mid_iteration_leaves_the_same_bits(undisturbed):
    """Other positions and moments: tests/in_memory_job."""
    job = kill_and_compare([Hold("1:1", "backward", KILLED_IN, 1)], undisturbed)
    assert next(event for event in job.events if event["event"] == "reconciled")["target"] == KILLED_IN - 1
    survivor = next(result for result in job.results.values() if result.status == 0)
    assert survivor.value["rerouted"] == " live: 5/6 | rerouted: 4 |"
    held = [told["memory"]["held"] for told in job.measured if told["memory"]]
    assert len(held) == WORKERS - 1
    assert all(own["before_b"] > 0 and own["after_b"] > 0 and own["peak"] == own["planned"] for own in held)


@pytest.mark.night
def test_a_worker_killed_in_the_script_s_own_sum_of_losses_leaves_the_same_bits(undisturbed):
    """Over Megatron's data-parallel group, on the last stage: the others get the sum of three, and train on."""
    kill_and_compare([Hold("0:1", "collective", KILLED_IN)], undisturbed)


@pytest.mark.night
def test_two_workers_of_both_tied_stages_killed_at_once(undisturbed):
    kill_and_compare([Hold("0:0", "backward", KILLED_IN, 1), Hold("2:1", "forward", KILLED_IN, 3)], undisturbed)


@pytest.mark.night
@pytest.mark.parametrize("options", [
    ("--untied",), ("--bf16",), ("--per-token-loss", "--count-zeros")], ids=" ".join)
def test_the_same_bits_with(options):
    arguments = job_of(*options)
    calm = calm_run(megatron_job.train, WORKERS, arguments)
    kill_and_compare([Hold("0:1", "backward", KILLED_IN, 2)], calm, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["full", pytest.param("selective", marks=pytest.mark.night)])
def test_recomputation_repeats_the_dropout_of_its_own_forward(what, undisturbed):
    """Where a killed worker's micro-batches run too: the bits are those of the job that keeps all activations."""
    kill_and_compare([Hold("0:1", "backward", KILLED_IN, 2)], undisturbed, job_of("--recompute", what))


@pytest.mark.night
def test_with_the_fast_reduction_results_agree_to_rounding():
    arguments = job_of("--optimizer", "sgd", "--lr", "0.1", reduction="fast")
    calm = calm_run(megatron_job.train, WORKERS, arguments)
    kill_and_compare([Hold("2:0", "backward", KILLED_IN, 2)], calm, arguments, within=1e-5)


# ---- evaluation

EVALUATING = ("--eval-every", "1", "--eval-iterations", "2")


@pytest.fixture(scope="module")
def evaluated() -> dict[int, Result]:
    return calm_run(megatron_job.train, WORKERS, job_of(*EVALUATING))


@pytest.mark.night
def test_evaluation_changes_nothing_and_reports_the_same_everywhere(evaluated, undisturbed):
    assert not any(differences(evaluated[rank], undisturbed[rank]) for rank in undisturbed)
    losses = [result.value["validations"] for result in evaluated.values() if result.value["stage"] == STAGES - 1]
    assert losses.count(losses[0]) == PIPELINES and len(set(losses[0])) == len(losses[0]) == 2 * ITERATIONS


@pytest.mark.night
def test_a_worker_killed_in_an_evaluation_leaves_the_same_losses(evaluated):
    arguments, position = job_of(*EVALUATING), "2:1"
    hold = Hold(position, "evaluate", 0, 7)
    with Job(megatron_job.train, WORKERS, arguments, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {position}, evaluated)
    for rank, result in job.results.items():
        if result.status == 0:
            assert result.value["validations"] == evaluated[rank].value["validations"]


# ---- without failures


OTHERWISE = {"overlap_grad_reduce": True, "average_in_collective": True, "bucket_size": 1000,
             "check_for_nan_in_grad": True, "check_for_large_grads": True}
"""Ways to the same sums of two addends."""


@pytest.mark.gloo
@pytest.mark.parametrize(("pipelines", "options", "data_parallel"), [
    # 192 tokens: 1 / 192 is rounded
    pytest.param(3, ("--per-token-loss", "--clip", "0.05", "--count-zeros"), {}, marks=pytest.mark.slow),
    *[pytest.param(*case, marks=pytest.mark.night) for case in [
        (3, (), {}), (2, (), {}), (2, ("--bf16",), OTHERWISE), (3, ("--optimizer", "sgd", "--lr", "0.1"), {}),
        (3, ("--untied", "--clip", "0"), {}),
        (2, ("--bf16", "--grad-reduce-in-bf16", "--clip", "0.05"), {})]]])
def test_without_failures_parameters_have_the_bits_of_cores_own_schedule(pipelines, options, data_parallel):
    arguments = {"pipelines": pipelines, "iterations": 3, "options": ("--dropout", "0", *options),
                 "data_parallel": data_parallel}
    with Job(megatron_job.train, 2 * pipelines, {**arguments, "plugin": False}, coordinated=False) as job:
        stock = job.wait()
    with Job(megatron_job.train, 2 * pipelines, arguments) as job:
        ours = job.wait()
    for rank in stock:
        assert stock[rank].status == ours[rank].status == 0, (stock[rank].error, ours[rank].error)
        found = differences(stock[rank], ours[rank])
        assert found.pop("losses", 0.0) < 1e-5  # of the sums over the global batch, for the log
        assert not found
        assert ours[rank].value["zeros"] == stock[rank].value["zeros"]
        assert ours[rank].value["kind of norm"] == "float"
