"""What Megatron's loop sets between two steps, when a step is undone and made again after that."""

from __future__ import annotations

import copy
import json
import math
import numbers
import pickle
import re
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("megatron.core")


def test_a_step_made_again_has_its_own_learning_rate_and_leaves_the_loops_latest() -> None:
    from megatron_recycle.backends.megatron.rates import Rates

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
    from megatron_recycle.backends.megatron.lazy_scalar import LazyScalar

    looked = []

    def find() -> float:
        looked.append(1)
        return 1.25

    norm = LazyScalar(find)
    assert norm is not None and isinstance(norm, numbers.Real) and not looked
    assert f"{norm:.3f}" == "1.250" and float(norm) == norm == 1.25
    assert looked == [1]


LATE = """number + 1; 1 - number; number * number; 2 / number; number // 0.5; 7 % number; number ** 2; -number
    abs(-number); divmod(7, number); round(number); round(number, 1); int(number); bool(number); hash(number)
    {number: 1}[1.25]; str(number); '%.2f' % number; max(number, 2.0); number >= 1.25; 1.5 > number; number != 1.25
    sum([number, number]); math.sqrt(number); math.ceil(number); torch.ones(2).mul(2) * number
    (torch.ones(2) < number).tolist(); numpy.mean([number, number]); numpy.array([number], float)
    copy.deepcopy([number]); pickle.loads(pickle.dumps(number)); json.dumps(number, default=float); number.real"""


@pytest.mark.parametrize("expression", re.split(r";|\n", LATE))
def test_a_late_norm_computes_as_a_float(expression: str) -> None:
    from megatron_recycle.backends.megatron.lazy_scalar import LazyScalar

    names = {"math": math, "torch": torch, "numpy": numpy, "copy": copy, "pickle": pickle,
             "json": json}
    late, plain = (eval(expression.strip(), names, {"number": number}) for number in (LazyScalar(lambda: 1.25), 1.25))
    assert type(late) is type(plain) and repr(late) == repr(plain)


def test_a_late_norm_of_zero_is_false_and_one_that_is_no_number_is_unlike_itself() -> None:
    from megatron_recycle.backends.megatron.lazy_scalar import LazyScalar

    assert not LazyScalar(lambda: 0.0)
    missing = LazyScalar(lambda: math.nan)
    assert missing != missing and not missing < 1.0
