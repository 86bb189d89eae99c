"""A chunk's first forward is run twice: what draws from a generator out of sight is noticed, and named."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.compute import find_generators
from megatron_recycle.runtime.first_forward import first_forward
from megatron_recycle.runtime.stage import Forward
from tests.fakes.site import PlainStage, site_of

CPU = torch.device("cpu")
TABLE: dict[str, Any] = {}


class Checked:
    """A worker whose first forward is checked; its stage is ``module``."""

    def __init__(self, module: nn.Module, reduction: str = "exact", **settings: Any) -> None:
        self.site = site_of(PlainStage(module), reduction=reduction, **settings)
        self.unchecked = self.site.unchecked
        self.activity, self.generators = self.site.phases.activity, self.site.framework.generators
        self.metered: list[bool] = []

    def run(self, inputs: tuple[torch.Tensor, ...] | None, batch: Any, metered: bool) -> Forward:
        self.metered.append(metered)
        self.generators.seed(7)
        made = self.site.stage.module(batch if inputs is None else inputs[0])
        return Forward((inputs, made), (made,), None, roots=(made,))

    def forward(self, inputs: tuple[torch.Tensor, ...] | None = None, batch: Any = None) -> torch.Tensor:
        """The outputs of the first micro-batch."""
        given = (torch.ones(2, 4, requires_grad=True),) if inputs is None and batch is None else inputs
        with self.generators.kept():
            made: Any = first_forward(self.site, SimpleNamespace(siblings=None), 0, self.run, given, batch)  # type: ignore
        return made.outputs[0]


class Noise(nn.Module):
    """Adds what ``draw`` gives."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.draw()


def model(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.GELU(), *layers), nn.Linear(4, 4))


def hidden() -> torch.Tensor:
    """Draws from a generator that nobody finds: its name is made up."""
    return torch.rand(1, generator=globals()["TA" + "BLE"]["generator"])


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    TABLE["generator"] = torch.Generator().manual_seed(1)
    yield
    TABLE.clear()


@contextmanager
def lines() -> Iterator[list[str]]:
    """The warnings of the block."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    get_logger().addHandler(handler)
    yield found
    get_logger().removeHandler(handler)


DRAWS: dict[str, Callable[[], Any]] = {
    "a generator out of sight": hidden,
    "one of a moment": lambda: torch.rand(1, generator=_anew()),
    "the clock": lambda: time.monotonic_ns() % 1000003 / 1e6,
    "the system": lambda: random.SystemRandom().random(),
}


def _anew() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator


@pytest.mark.parametrize("name", DRAWS)
def test_exact_refuses_what_is_drawn_out_of_sight_and_names_the_layer(name):
    site = Checked(model(nn.Dropout(0.5), Noise(DRAWS[name])))
    with pytest.raises(UnsupportedError, match=r"on worker 0:0, because of layer 1\.2 \(Noise\)\. .*check_forward"):
        site.forward()
    assert site.unchecked == {0}


def test_fast_names_the_layer_once_and_trains_on():
    site = Checked(model(Noise(hidden)), "fast")
    with lines() as said:
        site.forward()
    assert len(said) == 1 and "because of layer 1.1 (Noise)" in said[0] and not site.unchecked


class Skips(nn.Module):
    """Leaves layers out, by numbers that nobody can set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if hidden() < 0.5:
                x = layer(x)
        return x


class Between(nn.Module):
    """A function between two layers draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * hidden())


@pytest.mark.parametrize(("module", "named"), [
    (lambda: model(Skips()), r"layer 1\.1 \(Skips\)"), (Skips, "the code of Skips"),
    (lambda: model(Between()), r"layer 1\.1 \(Between\), behind layer 1\.1\.first \(Linear\)"),
    (lambda: nn.Sequential(Between(), Noise(hidden)), r"layer 0 \(Between\)")])
def test_the_layer_whose_own_code_draws_is_named(module, named):
    with pytest.raises(UnsupportedError, match=f"because of {named}"):
        Checked(module()).forward()


def test_a_loss_that_draws_is_told_from_the_layers():
    site = Checked(model())
    run = site.run

    def with_loss(*given: Any) -> Forward:
        made = run(*given)
        return Forward(made.saved, (), made.outputs[0].sum() * hidden(), roots=())

    site.run = with_loss  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match=r"the code around the model \(.*\), behind the code of Sequential"):
        site.forward()


class Late(nn.Module):
    """Makes its generator when it is first called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.late = _anew()
        return x * torch.rand(4, generator=self.late)


def test_a_generator_that_the_first_forward_makes_is_set_before_the_one_that_counts():
    """So that it is no fault, and other workers draw the same numbers."""
    with lines() as said:
        sites = [Checked(nn.Sequential(Late())) for _ in range(2)]
        assert torch.equal(*(site.forward() for site in sites))
    assert not said and sites[0].metered == [False, True, False]


class Drops(nn.Module):
    """Draws from everything that is set by place."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x) * random.random() + numpy.random.rand() + torch.rand(4, generator=self.own)


def test_what_is_drawn_by_place_passes_with_the_numbers_that_it_has_without_the_check():
    torch.manual_seed(3)
    site = Checked(model(Drops(), nn.Dropout(0.3)))
    before = _state()
    with lines() as said:
        out = site.forward()
    assert _state() == before
    assert torch.equal(out, site.run((torch.ones(2, 4),), None, True).outputs[0])
    assert not said and not site.unchecked and site.metered == [False, True, True]
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in site.site.stage.module.parameters())


def _state() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]


class Counts(nn.Module):
    """Leaves behind what it has done, which no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.name, self.norm = 0, "new", nn.BatchNorm1d(4)
        self.mean, self.last = torch.zeros(4), torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.name += "."
        self.mean += x.detach().mean(0)
        self.last = self.norm(x)
        return self.last


def test_what_forwards_leave_behind_is_as_after_one():
    checked, once = Checked(Counts()), Checked(Counts())
    given = torch.randn(6, 4)
    out = checked.forward((given.clone().requires_grad_(),))
    alone = once.run((given,), None, True).outputs[0]
    one, other = checked.site.stage.module, once.site.stage.module
    assert torch.equal(out, alone) and (one.calls, one.name) == (1, "new.")
    assert torch.equal(one.mean, other.mean) and torch.equal(one.last, other.last)
    assert all(torch.equal(mine, others) for mine, others in zip(one.buffers(), other.buffers(), strict=True))
    out.sum().backward()  # nothing that its graph holds was written to


class Depends(nn.Module):
    """Its outputs depend on how often it was called."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


def test_a_count_that_outputs_depend_on_is_found():
    with pytest.raises(UnsupportedError, match="the code of Depends"):
        Checked(Depends()).forward()
    fast = Checked(Depends(), "fast")
    fast.forward()
    assert fast.site.stage.module.calls == 1


class Writes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x.float()


def test_inputs_and_data_that_a_layer_writes_to_are_whole_again():
    for given in ({"inputs": (torch.zeros(3, dtype=torch.int64),)}, {"batch": torch.zeros(3)}):
        assert Checked(Writes()).forward(**given).tolist() == [1, 1, 1]
        assert not next(iter(given.values()))[0].any()


def test_time_is_counted_apart():
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            said.append(site.activity.told()["what"])
            return x * 1

    said: list[str] = []
    site = Checked(Asks())
    site.activity.work("forward")
    site.forward()
    assert said == ["first forward", "forward"] and site.metered == [False, True]


def test_a_forward_that_fails_or_is_given_up_is_run_twice_the_next_time():
    site = Checked(model())
    run = site.run
    for at in range(2):
        def fails(*given: Any, at: int = at) -> Forward:
            if len(site.metered) == at:
                raise ValueError("the network has gone")
            return run(*given)

        site.run, site.metered = fails, []  # type: ignore[method-assign]
        with pytest.raises(ValueError):
            site.forward()
        assert site.unchecked == {0}
    site.run, site.metered = run, []  # type: ignore[method-assign]
    site.forward()
    assert site.metered == [False, True] and not site.unchecked


class Settings:
    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator = torch.Generator()


class Kind:
    generator = torch.Generator()


RNG, LIST, SETTINGS, QUEUE = {"dropout": torch.Generator()}, [torch.Generator()], Settings(), deque([torch.Generator()])
REACHED: dict[str, Callable[[], torch.Generator]] = {
    "a dict": lambda: RNG["dropout"], "a list": lambda: LIST[0], "an object": lambda: SETTINGS.generator,
    "a class": lambda: Kind.generator, "a deque": lambda: QUEUE[0],
    "a module": lambda: user_rngs.GENERATOR, "a module's dict": lambda: user_rngs.inner.TABLE["g"],  # noqa: F821
    "a function's attribute": lambda: _named.generator,
}


def _named() -> None:
    pass


_named.generator = torch.Generator()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", REACHED)
def test_generators_that_a_layers_code_reaches_by_name_are_set_by_place(name, monkeypatch):
    """Many a script keeps them so; with these the check has nothing to refuse."""
    script = ModuleType("user_rngs")
    script.GENERATOR, script.inner = torch.Generator(), ModuleType("user_rngs.inner")  # type: ignore[attr-defined]
    script.inner.TABLE, script.inner.outer = {"g": torch.Generator()}, script
    monkeypatch.setitem(globals(), "user_rngs", script)
    reached = REACHED[name]
    site = Checked(model(Noise(lambda: torch.rand(1, generator=reached()))))
    site.forward()
    assert site.metered == [False, True]


def test_the_first_layer_of_a_large_model_is_searched_too():
    layers = [Noise(hidden) for _ in range(2)]
    layers[0].own = torch.Generator()
    layers[0].draw = lambda: torch.rand(1, generator=layers[0].own)
    layers[1].draw = lambda: 0
    site = Checked(nn.Sequential(layers[0], *[nn.Dropout(0.1) for _ in range(3000)], layers[1]))
    site.forward()
    assert site.metered == [False, True]


def test_a_search_that_ends_early_says_so(monkeypatch):
    monkeypatch.setattr(find_generators, "_MOST", 50)
    with lines() as said:
        Checked(nn.Sequential(*[nn.Dropout(0.1) for _ in range(100)]))
    assert len(said) == 1 and "Sequential leads to more than 50 objects" in said[0]
