"""A script that changes parameters before every iteration has every step wait, and hears of it once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_recycle.plan import Grid, Worker
from megatron_recycle.runtime.user_edits import UserEdits
from tests.fakes.site import PlainStage, site_of


class Clamped(nn.Module):
    """Whose script writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


@pytest.fixture
def between() -> UserEdits:
    stepper: Any = SimpleNamespace(confirmed=False, standing=SimpleNamespace(committed=0, stepped=1))
    return UserEdits(site_of(PlainStage(Clamped()), me=Worker(0, 1), grid=Grid(2, (1,))), stepper)


def iterations(between: UserEdits, changing: str) -> int:
    """How many of them wait, if the script changes the weight before those that are marked."""
    waits: list[None] = []
    for mark in changing:
        between.leave()
        if mark == "x":
            with torch.no_grad():
                between._site.stage.module.weight.add_(1.0)
        between.take_in(lambda: waits.append(None))
    return len(waits)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings."""
    found: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *words: found.append(text % words))
    monkeypatch.setattr("megatron_recycle.runtime.user_edits.get_logger", lambda: logger)
    return found


def test_it_is_told_once_and_by_name(between: UserEdits, told: list[str]):
    assert iterations(between, "xxxx.xxxx.") == 8 and not told, "now and then is no habit"
    assert iterations(between, "xxxxxxxxx") == 9 and len(told) == 1
    assert "the script changes parameter weight, which" in told[0]


def test_where_each_iteration_is_settled_nothing_waits(between: UserEdits):
    between._stepper.standing.committed = between._stepper.standing.stepped
    assert iterations(between, "xxxx") == 0
