"""fp16: an overflow anywhere makes every stage skip the step, and halves the scale, by stock's rule, whatever dies."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaleConfig, LossScaleProfile
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.lr_schedules import WarmupLR

from megatron_recycle.backends.deepspeed.clipping import Clipping
from megatron_recycle.backends.deepspeed.masters import MasterWeightOptimizer
from megatron_recycle.backends.deepspeed.stage import DeepSpeedStage
from tests.backends import gpt_job
from tests.backends.comparing import check_survivors, differences
from tests.harness import Hold, Job, Result
from tests.references import calm_run

ITERATIONS, WINDOW, POWER = 6, 2, 6
OVERFLOWS = ((1, 1), (2, 3))
"""(stage, iteration); no other stage sees it by itself."""

WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 50, "warmup_type": "linear"}


def arguments(step: str, clipping: float = 0.0, iterations: int = ITERATIONS) -> dict[str, Any]:
    scaling = {"enabled": True, "initial_scale_power": POWER, "loss_scale_window": WINDOW, "min_loss_scale": 1}
    warmup = {"type": "WarmupLR", "params": WARMUP}
    return {"pipelines": 2, "stages": 3, "iterations": iterations, "clipping": clipping, "overflows": OVERFLOWS,
            "engine_settings": {"fp16": scaling, "scheduler": warmup}, "settings": {"reduction": "exact", "step": step}}


def config(dynamic: bool = True) -> LossScaleConfig:
    given = {"init_scale": 2**POWER, "scale_window": WINDOW, "min_scale": 1} if dynamic else None
    return LossScaleConfig(torch.float16, dynamic, 128.0, given, profile=LossScaleProfile.UNFUSED)


def stock_scales(overflows: Sequence[bool], dynamic: bool = True) -> list[float]:
    """The scale after each iteration, by stock's own code."""
    stock, scales = SimpleNamespace(loss_scale_config=config(dynamic), verbose=False), []
    for overflow in overflows:
        FP16_UnfusedOptimizer._update_scale(stock, overflow)
        scales.append(stock.loss_scale_config.cur_scale)
    return scales


def rate_after(steps: int) -> float:
    """The learning rate after so many steps, by stock's schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.01)
    schedule = WarmupLR(optimizer, **WARMUP)
    for _ in range(steps):
        schedule.step()
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("dynamic", [True, False])
def test_the_scale_follows_stocks_rule_and_can_be_put_back(dynamic):
    pattern = [False, True, True, False, False, False, False, False, True, False, False, False]
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = MasterWeightOptimizer(torch.optim.SGD([parameter], lr=0.1), config(dynamic))
    master, = optimizer.masters.values()
    for overflow, scale in zip(pattern, stock_scales(pattern, dynamic), strict=True):
        before, weights = optimizer.counters(), master.detach().clone()
        for _ in range(2):  # undone, and made again
            optimizer.set_counters(before)
            master.data.copy_(weights)
            optimizer.overflow, master.grad = overflow, torch.ones(3)
            optimizer.step()
        assert optimizer.loss_scale == scale
        assert torch.equal(master, weights) == overflow
        assert torch.equal(parameter.float(), master.half().float())


@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_steps_are_those_of_stocks_fp16_optimizer(clipping, monkeypatch):
    """Gradients scaled by 64, one of them overflowed; stock's window of growth lies beyond."""
    monkeypatch.setattr("deepspeed.runtime.fp16.unfused_optimizer.dist.get_rank", lambda: 0)
    numbers = torch.Generator().manual_seed(0)
    initial = [torch.randn(shape, generator=numbers).half() for shape in ((5, 3), (7,))]
    theirs, mine = ([torch.nn.Parameter(value.clone()) for value in initial] for _ in range(2))
    window = {"init_scale": 2**POWER, "scale_window": 1000, "min_scale": 1, "delayed_shift": 1}
    stock = FP16_UnfusedOptimizer(torch.optim.Adam(theirs, lr=0.1), dynamic_loss_scale=True, dynamic_loss_args=window,
                                  clip_grad=clipping, verbose=False)
    stock.optimizer.state.clear()  # it begins with a step without gradients, which counts as one of Adam's
    scaling = LossScaleConfig(torch.float16, True, 1.0, window, profile=LossScaleProfile.UNFUSED)
    masters = MasterWeightOptimizer(torch.optim.Adam(mine, lr=0.1), scaling)
    stage = object.__new__(DeepSpeedStage)
    stage.parameters, stage._stepped = mine, list(masters.masters.values())
    stage._optimizer, stage._staggered, stage._is_logging_rank, stage._zero = masters, False, lambda: True, None
    stage._state = SimpleNamespace(trained={str(number): parameter for number, parameter in enumerate(mine)})
    whole = SimpleNamespace(get_slice_parallel_rank=lambda: 0)  # no tensor-parallel part of something
    stage._engine = SimpleNamespace(global_steps=0, _exec_optimizer_step=masters.step, grid=whole,
                                    gradient_clipping=lambda: clipping)
    stage._clipping = Clipping(stage._engine, masters, everywhere=True)
    for number in range(6):
        gradients = [(2**POWER * torch.randn(value.shape, generator=numbers)).half() for value in initial]
        if number == 2:
            gradients[1][3] = torch.inf
        for parameter, gradient in zip(theirs, gradients):
            parameter.grad = gradient.clone()
        stock.step()
        norm_square = stage.norm_square(gradients)
        stage.step(gradients, stage.coefficient([norm_square], 0.0))
        assert masters.overflow == stock.overflow == (number == 2)
        assert masters.loss_scale == stock.loss_scale
        for ours, others in zip([*masters.masters.values(), *mine], [*stock.fp32_groups[0], *theirs]):
            if clipping:  # the norm is summed in another order
                torch.testing.assert_close(ours, others, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(ours, others)


def waiting(clipping: float) -> dict[int, Result]:
    """The job without failures whose stages wait for each other."""
    return calm_run(gpt_job.train, 6, arguments("barrier", clipping))


@pytest.mark.processes
@pytest.mark.night
def test_every_stage_skips_the_step_in_which_one_overflowed():
    overflowed = [any(iteration == when for _, when in OVERFLOWS) for iteration in range(ITERATIONS)]
    for result in waiting(0.0).values():
        counters = result.value["counters"]
        assert counters["steps"] == ITERATIONS and counters["skipped"] == 2
        assert counters["scale"] == stock_scales(overflowed)[-1]
        assert counters["rate"] == rate_after(ITERATIONS - 2), "moved on with the steps that were made"
    with Job(gpt_job.train, 6, arguments("staggered")) as job:
        results = job.wait()
    for rank, result in results.items():
        assert result.status == 0 and differences(result, waiting(0.0)[rank]) == {}
        assert result.value["counters"] == waiting(0.0)[rank].value["counters"]
    undone = {event["iteration"] for event in job.events if event["event"] == "rolled_back"}
    assert undone == {1, 3}, "the other stages had stepped"


@pytest.mark.processes
@pytest.mark.night
@pytest.mark.parametrize(("clipping", "hold"), [
    (0.05, Hold("1:1", "step", 3)),
], ids=str)
def test_a_worker_killed_about_an_overflow(clipping, hold):
    with Job(gpt_job.train, 6, arguments("staggered", clipping), [hold]) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {hold.worker}, waiting(clipping))
    for rank, result in job.results.items():
        if result.status == 0:
            assert result.value["counters"] == waiting(clipping)[rank].value["counters"]


@pytest.mark.night
@pytest.mark.processes
def test_a_worker_that_hears_of_a_failure_before_it_has_read_the_verdict_skips_the_step_too():
    """It says what is said once, and does so while it has no handles: it is the first live worker."""
    dies, hears = Hold("1:2", "forward", 2), Hold("0:0", "forward", 2)
    overflowed = [Hold("0:1", "reduced", 1), Hold("1:1", "reduced", 1)]
    wanted = arguments("staggered")
    wanted["settings"]["reduction"] = "fast"  # exact begins no iteration before the last one is committed
    with Job(gpt_job.train, 6, wanted, [dies, hears, *overflowed]) as job:
        job.wait_held()
        for hold in overflowed:
            job.release(hold)
        job.wait_event("rolled_back", worker="1:0")
        job.kill(dies)
        job.wait_event("suspected", worker="1:2")
        job.release(hears)
        check_survivors(job, {dies.worker}, waiting(0.0), within=1e-3)


@pytest.mark.processes
@pytest.mark.night
def test_a_scale_that_is_too_large_comes_down_by_itself_tied_weights_included():
    wanted = arguments("staggered", 1.0, iterations=8)
    wanted["engine_settings"]["fp16"]["initial_scale_power"] = 22
    wanted |= {"overflows": (), "tied": True}
    hold = Hold("1:2", "reduced", 1)
    calm = calm_run(gpt_job.train, 6, {**wanted, "settings": {"reduction": "exact", "step": "barrier"}})
    counters = calm[0].value["counters"]
    assert 0 < counters["skipped"] < 8 and counters["scale"] < 2**22
    with Job(gpt_job.train, 6, wanted, [hold]) as job:
        job.wait_held()
        job.kill(hold)
        check_survivors(job, {hold.worker}, calm)
    assert all(result.value["counters"] == counters for result in job.results.values() if result.status == 0)


@pytest.mark.processes
@pytest.mark.night
def test_a_worker_that_comes_back_gets_masters_and_scale():
    wanted = arguments("staggered", iterations=10)
    calm = calm_run(gpt_job.train, 6, wanted)
    first, late = Hold("1:1", "backward", 2, 1), Hold("0:0", "forward", 5)
    with Job(gpt_job.train, 6, wanted, [first, late], limit=90) as job:
        job.wait_held(first)
        job.kill(first)
        job.wait_ended(3)
        job.wait_held(late)
        job.rejoin(3)
        job.wait_event("waiting", worker="1:1")
        job.release(late)
        job.wait_event("joined", worker="1:1")
        results = job.wait()
    for rank, result in results.items():
        assert result.status == 0, job.where()
        found = differences(result, calm[rank])
        assert not found and result.value["counters"] == calm[rank].value["counters"]
