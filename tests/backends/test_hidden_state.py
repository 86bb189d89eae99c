"""What a forward leaves in a model is found out: in buffers whenever it happens, in attributes at the beginning."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_recycle.backends import hidden_state
from megatron_recycle.backends.hidden_state import HiddenState
from megatron_recycle.errors import UnsupportedError


class Model(nn.Module):
    def __init__(self, change: Callable[[Model, int], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.inner.register_buffer("mean", torch.zeros(1))
        self.register_buffer("mask", None)
        self.change = change
        self.calls, self.rate, self.running = 0, 0.5, torch.zeros(1)
        self.number = 0

    def forward(self) -> int:
        self.change(self, self.number)
        return self.number


def add_late(model: Model, number: int) -> None:
    if number == 5:
        model.inner.register_buffer("late", torch.zeros(1))


def write_late(model: Model, number: int) -> None:
    if number == 5:
        model.inner.mean.add_(1)


def replace_late(model: Model, number: int) -> None:
    if number == 5:
        del model.inner.mean
        model.inner.register_buffer("mean", torch.zeros(1))


def remove_late(model: Model, number: int) -> None:
    if number == 5:
        del model.inner.mean


def run(change: Callable[[Model, int], None], monkeypatch: pytest.MonkeyPatch, forwards: int = 8) -> list[str]:
    """What is said about attributes."""
    said: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *values: said.append(text % values))
    monkeypatch.setattr(hidden_state, "get_logger", lambda: logger)
    model = Model(change)
    hidden = HiddenState(model)
    for number in range(forwards):
        object.__setattr__(model, "number", number)
        with torch.no_grad():
            hidden.unchanged(model)
        model.inner.mean.mul_(2)  # the script's own business, between forwards
    return said


@pytest.mark.parametrize(("change", "name"), [
    (add_late, "inner.late"), (write_late, "inner.mean"), (replace_late, "inner.mean"), (remove_late, "one that is")])
def test_a_buffer_that_changes_in_a_later_forward_is_refused_by_name(change, name, monkeypatch):
    with pytest.raises(UnsupportedError, match=f"change in forward: {name}"):
        run(change, monkeypatch)


def count(model: Model, number: int) -> None:
    model.calls += 1


def count_late(model: Model, number: int) -> None:
    model.made = getattr(model, "made", 0) + 1


def average(model: Model, number: int) -> None:
    model.running = 0.9 * model.running + 0.1


def average_in_place(model: Model, number: int) -> None:
    model.running.mul_(0.9)


def keep(model: Model, number: int) -> None:
    """A table that is computed once, and again for longer inputs."""
    if number in (0, 2):
        model.calls = number + 10


@pytest.mark.parametrize(("change", "name"), [
    (count, "calls"), (count_late, "made"), (average, "running"), (average_in_place, "running")])
def test_an_attribute_that_every_forward_changes_is_named_once(change, name, monkeypatch):
    said = run(change, monkeypatch)
    assert len(said) == 1 and f"each forward: {name}." in said[0]


def test_what_is_computed_once_and_kept_is_nobodys_business(monkeypatch):
    assert not run(keep, monkeypatch) and not run(lambda model, number: None, monkeypatch)


def test_of_a_stage_with_several_chunks_the_forwards_of_each_count_apart(monkeypatch):
    """What only one of them changes changes in each of its own."""
    said: list[str] = []
    monkeypatch.setattr(hidden_state, "get_logger", lambda: SimpleNamespace(
        warning=lambda text, *values: said.append(text % values)))
    models = nn.ModuleList([Model(count), Model(lambda model, number: None)])
    hidden = HiddenState(models)
    for _ in range(4):
        for chunk, model in enumerate(models):
            hidden.unchanged(model, chunk)
    assert len(said) == 1 and "each forward: 0.calls." in said[0]
