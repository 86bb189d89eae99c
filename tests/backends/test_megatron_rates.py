"""What Megatron's loop sets between two steps, when a step is undone and made again after that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.processes


def test_a_step_made_again_has_its_own_learning_rate_and_leaves_the_loops_latest() -> None:
    from megatron_recycle.backends.megatron_rates import Rates

    group: dict[str, Any] = {"params": [], "lr": 0.0, "weight_decay": 0.1, "betas": (0.9, 0.99)}
    rates, used = Rates(SimpleNamespace(param_groups=[group])), []

    def step() -> None:
        with rates.of_next_step():
            used.append(group["lr"])

    for iteration in range(2):
        group["lr"] = 10.0 + iteration
        rates.set(iteration)
        step()
    group["lr"] = 12.0  # the loop, before the verdict on iteration 1 is known
    rates.steps -= 1  # undone
    step()
    assert group["lr"] == 12.0
    rates.forget(1)
    rates.set(2)
    step()
    assert used == [10.0, 11.0, 11.0, 12.0] and group["betas"] == (0.9, 0.99)


def test_a_late_norm_waits_only_when_it_is_looked_at() -> None:
    from megatron_recycle.backends.megatron_late import LateNumber

    looked = []

    def find() -> float:
        looked.append(1)
        return 1.25

    norm = LateNumber(find)
    assert norm is not None and not looked
    assert f"{norm:.3f}" == "1.250" and float(norm) == norm == 1.25 and 1.0 < norm < 2.0
    assert looked == [1]
