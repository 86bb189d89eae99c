"""DeepSpeed's compiled Adam on CPUs: a worker that comes in has the powers of its peers, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_recycle.backends.deepspeed.native_adam import NativeAdam

BETAS = (0.9, 0.95)


class Native:
    """Adam_Optimizer of DeepSpeed's csrc/includes/cpu_adam.h: what it keeps of the steps it is told of."""

    def __init__(self, beta1: float = 0.0, beta2: float = 0.0) -> None:
        self.betas, self.step, self.powers = (np.float32(beta1), np.float32(beta2)), 0, (np.float32(1), np.float32(1))

    def told(self, step: int, beta1: float, beta2: float) -> None:
        betas = np.float32(beta1), np.float32(beta2)
        if betas == self.betas and step == self.step + 1:
            self.powers = self.powers[0] * betas[0], self.powers[1] * betas[1]
        elif betas != self.betas or step != self.step:
            self.powers = np.float32(float(betas[0])**step), np.float32(float(betas[1])**step)
        self.betas, self.step = betas, step


class Fused(torch.optim.Optimizer):
    """DeepSpeed's FusedAdam."""

    adam_w_mode = 1

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(1))], {})
        self.native = Native()
        self.multi_tensor_adam: Any = lambda chunk, skip, tensors, rate, beta1, beta2, epsilon, step, *rest: (
            self.native.told(step, beta1, beta2))

    def makes(self, step: int, betas: tuple[float, float] = BETAS) -> None:
        self.multi_tensor_adam(1, None, [], 0.1, *betas, 1e-8, step, 1, 1, 0.0)


class Plain(torch.optim.Optimizer):
    """DeepSpeedCPUAdam."""

    opt_id = 3

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(1))], {})
        self.native = native = Native(*BETAS)

        class Compiled:
            @staticmethod
            def adam_update(number: int, step: int, rate: float, beta1: float, beta2: float, *rest: Any) -> None:
                native.told(step, beta1, beta2)

        self.ds_opt_adam: Any = Compiled()

    def makes(self, step: int, betas: tuple[float, float] = BETAS) -> None:
        self.ds_opt_adam.adam_update(3, step, 0.1, *betas, 1e-8)


def trained(kind: Any, steps: list[int], betas: tuple[float, float] = BETAS) -> tuple[Any, NativeAdam]:
    optimizer = kind()
    watched = NativeAdam(optimizer)
    for step in steps:
        optimizer.makes(step, betas)
    return optimizer, watched


@pytest.mark.parametrize("kind", [Fused, Plain])
@pytest.mark.parametrize("first", [1, 40], ids=["from the start", "from a checkpoint"])
def test_one_that_comes_in_has_its_peers_powers(kind, first):
    peer, watched = trained(kind, list(range(first, first + 23)))
    late, own = trained(kind, [])
    own.set_counters(watched.counters())
    for step in range(first + 23, first + 60):
        peer.makes(step)
        late.makes(step)
        assert late.native.powers == peer.native.powers
    alone, _ = trained(kind, [first + 59])
    assert alone.native.powers != peer.native.powers  # what this is about


@pytest.mark.parametrize("back", [1, 5])
def test_steps_that_are_undone_and_made_again_leave_the_powers_of_those_made_once(back):
    once, _ = trained(Fused, list(range(1, 41)))
    again, watched = trained(Fused, list(range(1, 31 - back)))
    before = watched.counters()
    for step in range(31 - back, 31):
        again.makes(step)
    watched.set_counters(before)
    for step in range(31 - back, 41):
        again.makes(step)
    assert again.native.powers == once.native.powers


def test_other_betas_begin_other_powers_and_a_peer_is_told():
    peer, watched = trained(Fused, list(range(1, 20)))
    for step in range(20, 30):
        peer.makes(step, (0.8, 0.99))
    late, own = trained(Fused, [])
    own.set_counters(watched.counters())
    assert late.native.powers == peer.native.powers


def test_all_that_load_a_checkpoint_in_a_recovery_work_them_out():
    peer, watched = trained(Fused, list(range(1, 20)))
    watched.begin_anew()
    late, _ = trained(Fused, [])
    for step in range(18, 25):
        peer.makes(step)
        late.makes(step)
    assert late.native.powers == peer.native.powers


def test_an_optimizer_of_torch_has_nothing_of_the_kind():
    watched = NativeAdam(torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]))
    watched.set_counters(None)
    assert watched.counters() is None
