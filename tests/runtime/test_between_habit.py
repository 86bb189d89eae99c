"""A script that changes something before every iteration has every step wait, and hears of it once; so does one whose
variables are too many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_recycle.config import RecycleConfig
from megatron_recycle.plan import Worker
from megatron_recycle.runtime.between import Between


class Counting(nn.Module):
    """Whose script counts in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(2)), 0


@pytest.fixture
def between() -> Between:
    nothing = SimpleNamespace(adopt=lambda *_: None, adopt_trackers=lambda: None)
    module = Counting()
    stage = SimpleNamespace(module=module, functions=(), shards=None, may_guess_wrong=False, references={},
                            counters=dict, look=lambda: False,
                            state=lambda: {"parameter weight": module.weight.detach()})
    guard = SimpleNamespace(returns=False, void=lambda _: False)
    site: Any = SimpleNamespace(stage=stage, framework=SimpleNamespace(generators=nothing), config=RecycleConfig(),
                                place=SimpleNamespace(me=Worker(0, 1)),
                                trainable=SimpleNamespace(brought=None, shards={}, guard=guard, lay_out=lambda: None))
    stepper: Any = SimpleNamespace(confirmed=False, standing=SimpleNamespace(committed=0, stepped=1))
    return Between(site, stepper)


def iterations(between: Between, changing: str) -> int:
    """How many of them wait, if the script changes its count before those that are marked."""
    waits: list[None] = []
    for mark in changing:
        between.leave()
        if mark == "x":
            between._site.stage.module.seen += 1
        between.take_in(lambda: waits.append(None))
    return len(waits)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings."""
    found: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *words: found.append(text % words))
    monkeypatch.setattr("megatron_recycle.runtime.between.get_logger", lambda: logger)
    return found


def test_it_is_told_once_and_by_name(between: Between, told: list[str]):
    assert iterations(between, "xxxx.xxxx.") == 8 and not told, "now and then is no habit"
    assert iterations(between, "xxxxxxxxx") == 9 and len(told) == 1
    assert "the script changes seen, which" in told[0]


def test_a_search_for_variables_that_stops_early_is_told_once_with_the_remedies(between: Between, told: list[str]):
    stage = between._site.stage
    iterations(between, "..")
    assert not told
    stage.module.parts = nn.ModuleList(nn.Dropout() for _ in range(1300))
    between._edits._variables = None  # as before the first iteration
    iterations(between, "....")
    (line,) = told
    assert "stage 1" in line and "more than 20000 objects" in line
    assert "reduction: exact" in line and "settle()" in line


def test_where_each_iteration_is_settled_nothing_is_searched(between: Between, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron_recycle.runtime.compute.edits.Variables", lambda *_: pytest.fail("a search"))
    between._stepper.standing.committed = between._stepper.standing.stepped
    assert iterations(between, "xxxx") == 0
