"""Randomness by place: the same numbers wherever and whenever a piece of work runs."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeeds
from torch import nn
from torch.nn import functional

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.compute.find_generators import generators_in
from megatron_recycle.runtime.compute.random_state import Generators, seed_of

CPU = torch.device("cpu")
module_level = random.Random(1)


def from_module_level() -> float:
    return module_level.random()


class Layer(nn.Module):
    """Draws from generators of its own."""

    shared = numpy.random.RandomState(4)

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(1)
        self.settings = SimpleNamespace(draws=[numpy.random.default_rng(2)])
        self.function = functools.partial(lambda generator: generator.random(), random.Random(3))

    def forward(self) -> list[float]:
        return [float(torch.rand(1, generator=self.own)), self.settings.draws[0].random(), self.function(),
                self.shared.normal(), from_module_level()]


def all_kinds(generators: Generators) -> Callable[[], list[float]]:
    """Draws from every generator that there is."""
    layer, tracker = Layer(), deepspeeds.get_cuda_rng_tracker()
    generators.adopt("the model", nn.ModuleList([nn.Sequential(layer)]))
    generators.adopt_trackers()

    def draw() -> list[float]:
        with tracker.fork("attention"):
            tracked = float(functional.dropout(torch.ones(100)).sum())
        return [tracked, float(torch.rand(1)), random.random(), random.gauss(0, 1), numpy.random.rand(),
                numpy.random.randn(), *layer()]
    return draw


@pytest.fixture
def tracked() -> Iterator[None]:
    """DeepSpeed's tracker has a state, as in a script with dropout through it."""
    deepspeeds.get_cuda_rng_tracker().add("attention", 7)
    yield
    deepspeeds.get_cuda_rng_tracker().reset()


def test_every_place_has_its_own_seed_that_torch_accepts():
    places = list(product((0, 1), range(3), range(3), range(3), (0, 1)))
    seeds = {seed_of(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_forward_draws_the_same_numbers_again_and_what_is_outside_does_not_notice(tracked):
    generators = Generators(CPU)
    draw = all_kinds(generators)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False)["state"]["key"].tobytes()
    with generators.kept():
        undisturbed = [draw() for _ in range(2)]
    with generators.at(seed_of(0, 5, 1, 2, 0)):
        first = [draw() for _ in range(2)]
    with generators.at(seed_of(0, 5, 1, 3, 0)):
        other = [draw() for _ in range(2)]
    with generators.kept():
        assert [draw() for _ in range(2)] == undisturbed
    with generators.at(seed_of(0, 5, 1, 2, 0)):
        assert [draw() for _ in range(2)] == first
    for mine, others, outside in zip(first[0], other[0], undisturbed[0]):
        assert mine not in (others, outside)
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False)["state"]["key"].tobytes()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_numpys_second_normal_number_is_not_lost():
    generators = Generators(CPU)
    numpy.random.seed(0)
    expected = numpy.random.randn(4)
    numpy.random.seed(0)
    first = numpy.random.randn()
    with generators.at(1):
        numpy.random.randn()
    assert [first, *(numpy.random.randn() for _ in range(3))] == expected.tolist()


def test_numpys_global_generator_may_have_other_bits():
    generators, usual = Generators(CPU), numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        drawn = []
        for number in (5, 5, 6):
            with generators.at(number):
                drawn.append(numpy.random.randn())
        assert drawn[0] == drawn[1] != drawn[2]
    finally:
        numpy.random.set_bit_generator(usual)


def test_torch_draws_its_own_in_a_backward_and_the_others_what_the_forward_drew():
    """Checkpoints put torch's back themselves."""
    generators = Generators(CPU)
    with generators.kept():
        generators.seed(5)
        forward = random.random(), numpy.random.rand(), float(torch.rand(1))
        generators.seed(5, first=6)
        backward = random.random(), numpy.random.rand(), float(torch.rand(1))
    assert forward[:2] == backward[:2] and forward[2] != backward[2]


def test_the_state_comes_back_when_the_forward_fails():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(ValueError), Generators(CPU).at(1):
        torch.rand(1)
        raise ValueError
    assert torch.equal(torch.get_rng_state(), before)


class Fork:
    """A tracker as gpt-neox's or Megatron-DeepSpeed's, with states or, as in newer ones, generators."""

    def __init__(self, states: dict[str, Any]) -> None:
        self.states = states

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        yield


@pytest.mark.parametrize("state", [torch.Generator().get_state(), torch.Generator()], ids=["state", "generator"])
def test_a_scripts_own_tracker_is_found_and_its_parts_draw_apart(state, monkeypatch):
    script, drawn = ModuleType("megatron_fork.random"), {}
    script.TRACKER = Fork({"model-parallel-rng": state, "data-parallel-rng": state})
    monkeypatch.setitem(sys.modules, script.__name__, script)
    for part, number in ((0, 5), (1, 5), (0, 6), (0, 5)):
        generators = Generators(CPU, part)
        generators.adopt_trackers()
        with generators.at(number):
            for name, own in script.TRACKER.get_states().items():
                own = own.get_state() if isinstance(own, torch.Generator) else own
                drawn.setdefault((name, part, number), []).append(own.clone())
    again = drawn["model-parallel-rng", 0, 5]
    assert torch.equal(*again)
    assert not torch.equal(again[0], drawn["model-parallel-rng", 0, 6][0])
    if isinstance(state, torch.Tensor):  # two names of one generator are one
        assert not torch.equal(again[0], drawn["model-parallel-rng", 1, 5][0])
        assert torch.equal(drawn["data-parallel-rng", 0, 5][0], drawn["data-parallel-rng", 1, 5][0])


def test_what_cannot_be_set_is_refused_by_name(monkeypatch):
    script = ModuleType("megatron_fork.random")
    script.TRACKER = Fork({"odd": torch.zeros(3, dtype=torch.uint8)})
    monkeypatch.setitem(sys.modules, script.__name__, script)
    with pytest.raises(UnsupportedError, match=r"megatron_fork\.random\.TRACKER \(Fork\)"):
        Generators(CPU).adopt_trackers()

    class Hardware(random.Random):
        def seed(self, *_: Any) -> None:
            raise OSError("a device without seeds")

    model = nn.Sequential(nn.Linear(1, 1))
    model[0].noise = Hardware.__new__(Hardware)
    with pytest.raises(UnsupportedError, match=r"the model: 0\.noise \(Hardware\)"):
        Generators(CPU).adopt("the model", model)


def test_generators_are_found_where_users_keep_them():
    model = nn.Sequential(*[nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(Layer()))))),
                            nn.Linear(1, 1)])
    names = sorted(name.rpartition("0.")[2] if name.startswith("0.") else name for name, _ in generators_in(model))
    assert len(names) == 5 and "own" in names and "shared" in names
    held = random.Random(1)

    def draw() -> float:
        return held.random()

    assert [name for name, _ in generators_in(draw)] == ["held"]
    loop: dict[str, Any] = {}
    loop["self"] = [loop] * 3
    assert not list(generators_in(loop)) and not list(generators_in(torch.zeros(3)))


def test_what_a_checkpoint_finds_amid_an_action_is_what_the_script_has_left():
    generators = Generators(torch.device("cpu"))
    torch.manual_seed(5)
    random.seed(5)
    left = torch.get_rng_state(), random.getstate()
    with generators.kept():
        generators.seed(7)
        with generators.at(8):
            with generators.of_script():
                assert torch.equal(torch.get_rng_state(), left[0]) and random.getstate() == left[1]
                torch.rand(3)
            assert torch.initial_seed() == 8
    with generators.kept(), generators.of_script():
        assert torch.equal(torch.get_rng_state(), left[0])


def test_a_parameter_that_is_a_key_is_not_written_out():
    """An optimizer's state has parameters as keys, whose text is all of their numbers."""
    class Weight(nn.Parameter):
        def __repr__(self) -> str:
            raise AssertionError("on a GPU this waits for it")

    held = {Weight(torch.zeros(2)): random.Random(1), "rate": random.Random(2), 3: random.Random(3)}
    assert sorted(name for name, _ in generators_in(held)) == ["3", "Weight 0", "rate"]
