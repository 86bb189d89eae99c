"""fp16 under Megatron: an overflow anywhere makes every stage leave the step out, by stock's rule, whatever dies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.backends import megatron_job
from tests.backends.comparing import differences
from tests.harness import Hold, Job
from tests.references import calm_run

pytest.importorskip("megatron.core")

ITERATIONS = 12
FP16 = ("--fp16", "--initial-loss-scale", str(2.0**26), "--clip", "0.5")
"""The first steps overflow; hysteresis is 2 and the window of growth 4, so that the scale falls, stands and grows."""
SHARDS = "--distributed-optimizer"


def left_out(norms: list[float]) -> list[int]:
    return [iteration for iteration, norm in enumerate(norms) if math.isnan(norm)]


def same(one: list[float], other: list[float], within: float = 0.0) -> bool:
    return left_out(one) == left_out(other) and all(
        math.isclose(a, b, rel_tol=within) for a, b in zip(one, other, strict=True) if not math.isnan(a))


@pytest.mark.processes
@pytest.mark.gloo
@pytest.mark.parametrize(("stages", "options"), [
    pytest.param(2, (*FP16, "--count-zeros", "--min-lr", "1e-4"), marks=pytest.mark.night),
    *[pytest.param(*case, marks=pytest.mark.night) for case in [
        (2, (*FP16, "--grad-reduce-in-bf16")), (2, (*FP16, SHARDS)), (1, FP16), (2, (*FP16, "--untied", "--clip", "0")),
        (2, ("--fp16", "--loss-scale", "128")), (2, ("--bf16", "--loss-scale", "4096"))]]])
def test_without_failures_steps_and_those_left_out_are_stocks(stages, options):
    arguments = {"pipelines": 2, "stages": stages, "iterations": ITERATIONS, "options": ("--dropout", "0", *options)}
    with Job(megatron_job.train, 2 * stages, {**arguments, "plugin": False}, coordinated=False) as job:
        stock = job.wait()
    with Job(megatron_job.train, 2 * stages, arguments) as job:
        ours = job.wait()
    for rank in stock:
        assert stock[rank].status == ours[rank].status == 0, (stock[rank].error, ours[rank].error)
        one, other = stock[rank].value, ours[rank].value
        # With shards stock's norm is summed in another order.
        assert same(one["norms"], other["norms"], 1e-6 if SHARDS in options else 0.0), (one["norms"], other["norms"])
        assert ("--loss-scale" in options) == (not left_out(one["norms"]))
        if SHARDS not in options:
            found = differences(stock[rank], ours[rank])
            assert found.pop("losses", 0.0) < 1e-5  # of the sums over the global batch, for the log
            assert not found and one["zeros"] == other["zeros"]


EXACT: Mapping[str, Any] = {"pipelines": 2, "stages": 2, "iterations": ITERATIONS,
                            "options": (*FP16, "--min-lr", "1e-4"), "settings": {"reduction": "exact"}}


@pytest.mark.processes
@pytest.mark.night
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("step", "dies_in", "more"), [
    ("staggered", 1, ()), ("barrier", 3, ()), ("barrier", 1, (SHARDS,)), ("staggered", 6, (SHARDS,))])
def test_a_worker_that_dies_among_steps_that_are_left_out_comes_back_to_the_same_scale(step, dies_in, more):
    """One that comes in is told which steps were left out: its rates follow the same schedule."""
    arguments = {**EXACT, "options": (*EXACT["options"], *more), "settings": {**EXACT["settings"], "step": step}}
    calm = calm_run(megatron_job.train, 4, arguments)
    assert {0, 1} < {*left_out(calm[0].value["norms"])} and len(left_out(calm[0].value["norms"])) < ITERATIONS - 1
    dies, late = Hold("1:1", "backward", dies_in, 1), Hold("0:0", "forward", dies_in + 3)
    with Job(megatron_job.train, 4, arguments, [dies, late], limit=150) as job:
        job.comes_back(dies, late, 3)
        for rank, result in job.wait().items():
            assert result.status == 0, job.where()
            found = {} if more else differences(result, calm[rank])
            assert not found, (rank, found)
            assert same(result.value["norms"], calm[rank].value["norms"])
        assert [e["iteration"] for e in job.events if e["event"] == "committed"] == list(range(ITERATIONS))


def optimizer(scale: float = 2.0**8) -> Any:
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    # Made on the CPU whatever its own code says.
    scaler = DynamicGradScaler.__new__(DynamicGradScaler)
    scaler._scale, scaler.min_scale = torch.tensor([scale]), torch.tensor([1.0])
    scaler.growth_factor, scaler.backoff_factor = torch.tensor([2.0]), torch.tensor([0.5])
    scaler.growth_interval, scaler.hysteresis = 2, 2
    scaler._growth_tracker, scaler._hysteresis_tracker = 0, 2
    return SimpleNamespace(grad_scaler=scaler)


def test_a_step_that_is_undone_gives_scale_trackers_and_list_back():
    from megatron_recycle.backends.megatron.scaling import Scaling

    scaling = Scaling(optimizer())
    scaling.leave_out(0)
    before = scaling.counters()
    scaling.leave_out(1)
    assert scaling.factor == 2.0**-7 and {*scaling.skipped} == {0, 1}
    scaling.set_counters(before)
    assert scaling.counters() == before and scaling.factor == 2.0**-8
    scaling.stepped()
    scaling.stepped()
    assert scaling.factor == 2.0**-9  # two finite ones
    scaling.skip(5)
    scaling.go_back(5)
    assert {*scaling.skipped} == {0}


def test_a_norm_too_large_for_fp32_of_finite_gradients_is_no_overflow():
    from megatron_recycle.backends.megatron.scaling import Scaling

    scaling, large = Scaling(optimizer()), torch.tensor([3e38, 3e38])
    assert not scaling.any_overflow([1.0, scaling.share(math.inf, [large])])
    assert scaling.any_overflow([1.0, scaling.share(math.nan, [large, torch.tensor([math.nan])])])
    assert scaling.any_overflow([1.0, scaling.share(math.inf, [torch.tensor([-math.inf])])])
    plain = Scaling(SimpleNamespace(grad_scaler=None))
    assert not plain.scales and plain.factor == 1.0 and not plain.any_overflow([math.inf])
