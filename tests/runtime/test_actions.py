"""One worker's F, B and W without other workers: whatever their order, the sums are autograd's."""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_recycle.errors import GenerationOver
from megatron_recycle.membership import Process, Standing
from megatron_recycle.plan import Action, Costs, Grid, Message, Problem, Worker
from megatron_recycle.planner.merge_bw import merged
from megatron_recycle.runtime import attempt as attempts
from megatron_recycle.runtime.attempt import Attempt
from megatron_recycle.runtime.compute.accumulate import WHOLE, Accumulators, Layout
from megatron_recycle.runtime.compute.split import Splitter
from megatron_recycle.runtime.computed import Computed
from megatron_recycle.runtime.generation import Current, Program, Scope
from megatron_recycle.runtime.lent.terms import HOME
from megatron_recycle.runtime.stage import Forward
from tests.fakes.site import PlainStage, site_of

WIDTH, PIPELINES, MICROBATCHES = 8, 2, 4
CPU, FIRST = torch.device("cpu"), Worker(0, 0)


def double(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(2)


class Model(nn.Module):
    """Layers used twice, tied, frozen, recomputed, and with hooks of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight
        self.twice, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.hooked, self.doubled = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.hooked.weight.register_hook(lambda gradient: 3 * gradient)
        self.doubled.weight.register_post_accumulate_grad_hook(double)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.twice(functional.relu(self.twice(self.embedding(tokens))))
        x = checkpoint(self.again, self.hooked(self.frozen(x)), use_reentrant=False)
        return self.head(self.doubled(x))


class FirstStage(PlainStage):
    """As the runtime sees a framework's stage; its outputs' gradients are given."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__(Model())
        self.gradient_dtype = dtype

    def forward(self, inputs: Any, batch: Any) -> Forward:
        outputs = self.module(batch[0])
        return Forward(((), (outputs,)), (outputs,), None, roots=(outputs,))

    def backward(self, forward: Forward, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        forward.saved[1][0].backward(gradients[0])
        return []


class Alone:
    """A worker, of the first stage unless told otherwise, with nobody else."""

    def __init__(self, kernel: Any = None, exact: bool = False, dtype: torch.dtype | None = None,
                 me: Worker = FIRST) -> None:
        draw = torch.Generator().manual_seed(1)
        places = [(d, m) for d in range(PIPELINES) for m in range(MICROBATCHES)]
        self.tokens = {place: torch.randint(WIDTH, (3, 5), generator=draw) for place in places}
        self.gradients = {place: torch.randn(3, 5, WIDTH, generator=draw) for place in places}
        self.stage = FirstStage(dtype)
        self.standing = Standing(Process(me))
        self.standing.join(1)
        self.site: Any = site_of(
            self.stage, me=me, grid=Grid(2, (MICROBATCHES,) * PIPELINES), data=self, standing=self.standing,
            splitter=Splitter(self.stage.module, kernel), reduction="exact" if exact else "fast", check_forward=False)
        self.memory, self.watch = self.site.meters.memory, self.site.meters.watch
        self.layout = self.site.trainable.layout
        self.metas: dict[int, Any] = {}

    def batch(self, pipeline: int, index: int) -> tuple[torch.Tensor]:
        return (self.tokens[pipeline, index % MICROBATCHES],)

    def send(self, message: Any, tensors: Any) -> None:
        pass

    def receive(self, message: tuple[str, int, int]) -> list[torch.Tensor]:
        return [self.gradients[message[1:3]]]

    def follow(self, plan: Any) -> None:
        pass

    def begin(self, label: Any) -> None:
        pass

    def use(self, order: list[Action]) -> None:
        plan: Any = SimpleNamespace(actions=lambda _: tuple(order), digest="sha256:00000", crossings={},
                                    done={}, _read=frozenset(), chunk=lambda worker, action: worker.stage,
                                    _route={(*place, 0): FIRST for place in self.tokens},
                                    problem=SimpleNamespace(grid=self.site.place.grid, split_backward=True, block=0,
                                                            chunks=2, chunks_of=((0,), (1,)), place_of=(0, 0)))
        program = Program.of(plan, FIRST)
        self.generation: Any = SimpleNamespace(
            groups=SimpleNamespace(me=FIRST, siblings=None, levelling=None, together=nullcontext, counting=nullcontext,
                                   world=SimpleNamespace(backend=SimpleNamespace(host=True))),
            transport=self, shared=[], scope=Scope(),
            program_of=lambda _: program, left_out_of=lambda _: 0,
            reduction_of=lambda _: SimpleNamespace(place=lambda pipeline, microbatch: (WHOLE, 0)))

    def run(self, order: list[Action]) -> Attempt:
        self.standing.stand_at(0)
        with patch.multiple(attempts, LossRelay=MagicMock(), Agreement=MagicMock()):
            stepper: Any = SimpleNamespace(standing=self.standing, enter_action=lambda: None, current=Current())
            self.attempt = Attempt(self.site, stepper, self.generation)
        for action in order:
            self.attempt.do(action)
        return self.attempt

    def sums(self) -> list[torch.Tensor]:
        return list(self.layout.views(self.attempt.computed.sums.sum(WHOLE)))


PROBLEM = Problem(Grid(2, (MICROBATCHES,) * PIPELINES), Costs.uniform(2, 1, 1, 1), full_backward=(0, 1))


def an_order(draw: random.Random) -> list[Action]:
    """Of all micro-batches F, B and W, and many a FB, as the planner merges them."""
    order, left = [], {(d, m): "FBW" for d in range(PIPELINES) for m in range(MICROBATCHES)}
    while left:
        place = draw.choice(list(left))
        count = 2 if left[place].startswith("B") and draw.random() < 0.6 else 1
        order += [Action(kind, *place) for kind in left[place][:count]]
        left[place] = left[place][count:]
        if not left[place]:
            del left[place]
    return list(merged(PROBLEM, FIRST, order))


def full(order: list[Action]) -> set[tuple[int, int]]:
    return {(action.pipeline, action.microbatch) for action in order if action.kind == "FB"}


def autograds(alone: Alone) -> list[torch.Tensor]:
    """Each micro-batch's gradients, as its hooks leave them, summed with more digits."""
    model = Model()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    for place, tokens in alone.tokens.items():
        model.zero_grad()
        model(tokens).backward(alone.gradients[place])
        for sum_, parameter in zip(sums, parameters):
            sum_ += parameter.grad
    return sums


@pytest.mark.parametrize("seed", range(8))
def test_full_and_split_backwards_in_any_order_add_up_to_autograds_sums(seed):
    """After an attempt that was given up somewhere."""
    draw = random.Random(seed)
    alone, order = Alone(), an_order(draw)
    alone.use(order)
    with pytest.raises(GenerationOver), alone.run(order[:draw.randrange(len(order))]):
        raise GenerationOver
    computed = alone.run(order).computed
    assert alone.memory.now == 0 and not computed.queues and not computed.forwards
    assert all(parameter.grad is None for parameter in alone.layout.parameters)
    assert 0 < len(full(order)) < PIPELINES * MICROBATCHES
    for found, expected in zip(alone.sums(), autograds(alone), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_an_attempt_that_is_over_frees_its_memory_at_once():
    """Activations and sums: not when the garbage collector comes round, nor when the recovery from its error ends."""
    alone, order = Alone(), an_order(random.Random(0))
    alone.use(order)
    gc.disable()
    try:
        with pytest.raises(GenerationOver) as failure, alone.run(order[:len(order) // 2]) as attempt:
            computed = attempt.computed
            kept = [weakref.ref(computed.sums), *map(weakref.ref, computed.forwards.values())]
            raise GenerationOver
        assert failure.tb is not None and len(kept) > 1 and not any(ref() for ref in kept)
        alone.run(order)
        over = weakref.ref(alone.attempt)
        del attempt, alone.attempt, failure
        assert over() is None
    finally:
        gc.enable()


def test_outputs_that_have_been_sent_are_not_kept_until_their_backward():
    """Only a reference to them: a stage's ``saved`` has what its backward needs."""
    computed = Computed(Accumulators(Alone().layout, lambda pipeline, microbatch: (WHOLE, 0)))
    output = torch.zeros(2)
    sent = weakref.ref(output)
    computed.add((0, 0), Forward((), (output,), None))
    del output
    assert sent() is None


@pytest.mark.parametrize("kind", ["B", "FB"])
def test_an_error_of_the_users_backward_keeps_no_sums(kind, monkeypatch):
    """Its traceback goes through the action that it comes from."""
    alone, order = Alone(), an_order(random.Random(0))
    alone.use(order)
    last = max(number for number, action in enumerate(order) if action.kind == kind)
    with pytest.raises(RuntimeError) as failure, alone.run(order[:last]) as attempt:
        sums = weakref.ref(attempt.computed.sums)
        monkeypatch.setattr(alone.stage, "backward", MagicMock(side_effect=RuntimeError))
        attempt.do(order[last])
    assert failure.tb is not None and sums() is None


def test_autograd_adds_full_backwards_to_the_sums(monkeypatch):
    """All but the gradient that a hook asks for."""
    alone, order, added = Alone(), an_order(random.Random(0)), {}
    right = Accumulators.add

    def add(self: Accumulators, pipeline: int, microbatch: int, contributions: Any) -> None:
        held = list(contributions)
        added.setdefault((pipeline, microbatch), []).extend(parameter for parameter, _ in held)
        right(self, pipeline, microbatch, held)

    monkeypatch.setattr(Accumulators, "add", add)
    alone.use(order)
    alone.run(order)
    for place, parameters in added.items():
        if place in full(order):
            assert len(parameters) == 1 and parameters[0] is alone.stage.module.doubled.weight
        else:
            assert len(parameters) == len(alone.layout.parameters)


def test_only_the_split_ones_are_timed():
    """So that B and W are known apart from each other, whatever runs in full."""
    alone, order = Alone(), an_order(random.Random(0))
    alone.use(order)
    alone.run(order)
    taken = alone.watch.take()
    split = PIPELINES * MICROBATCHES - len(full(order))
    assert len(taken["F"]) == PIPELINES * MICROBATCHES and len(taken["B"]) == len(taken["W"]) == split


@pytest.mark.parametrize("options", [
    {"exact": True}, {"kernel": lambda inputs, gradient, sum_: None}, {"dtype": torch.float64}],
    ids=["its bits must not depend on where it ran", "a kernel adds up what is deferred", "sums of another type"])
def test_every_backward_is_split_where(options):
    """The worker says so when the job begins, and takes no plan that has forgotten it."""
    alone = Alone(**options)
    assert not alone.site.may_be_full and Alone().site.may_be_full
    alone.use(an_order(random.Random(0)))
    with pytest.raises(AssertionError, match="runs B and W apart, the plan has FB"):
        alone.run([])


def test_a_full_backward_elsewhere_passes_its_gradients_on():
    """A plan may have one where others wait for it, though ours do not."""
    sent = []
    alone = Alone(me=Worker(0, 1))
    alone.send = lambda message, tensors: sent.append(message)
    order = [Action.parse(name) for name in ("F0.0", "F0.1", "B0.0", "W0.0", "FB0.1")]
    alone.use(order)
    alone.stage.forward = lambda inputs, batch: Forward(None, (), None)
    alone.stage.backward = lambda forward, gradients: [torch.zeros(1)]
    alone.site = replace(alone.site, place=replace(alone.site.place, grid=Grid(3, (MICROBATCHES,) * PIPELINES)))
    alone.run(order)
    assert [message for message in sent if message[0] == "B"] == [Message("B", 0, 0), Message("B", 0, 1)]


def test_what_a_forward_has_put_on_a_parameter_counts():
    """An auxiliary loss with a backward of its own, inside the model."""
    def with_auxiliary(model: Model, tokens: torch.Tensor) -> torch.Tensor:
        outputs = plain_forward(model, tokens)
        if torch.is_grad_enabled():
            model.hooked(model.embedding(tokens).detach()).square().mean().backward()
        return outputs

    plain_forward = Model.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "forward", with_auxiliary)
        alone, order = Alone(), [Action(kind, 0, number) for number in range(2) for kind in "FBW"]
        alone.tokens = {place: tokens for place, tokens in alone.tokens.items() if place in ((0, 0), (0, 1))}
        order[4:] = [Action("FB", 0, 1)]
        alone.use(order)
        alone.run(order)
        for found, expected in zip(alone.sums(), autograds(alone), strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_that_is_replaced_while_its_sum_is_lent_is_the_new_sum():
    parameter, scaled = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    sums = Accumulators(Layout([parameter, scaled]), lambda pipeline, microbatch: (WHOLE, 0))
    sums.add(0, 0, [(parameter, torch.full((2,), 3.0)), (scaled, torch.full((2,), 3.0))])
    with sums.lent(0, 1):
        (2 * parameter).sum().backward(create_graph=True)
        scaled.grad = 2 * scaled.grad
    assert parameter.grad is None and sums.sum(WHOLE).tolist() == [5, 5, 6, 6]


def test_sums_that_are_lent_come_back_whatever_happens():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    one, other, hooked = parameters
    hooked.register_post_accumulate_grad_hook(lambda parameter: None)
    sums = Accumulators(Layout(parameters), lambda pipeline, microbatch: (WHOLE, 0))
    with sums.lent(0, 0):
        assert all(parameter.grad is None for parameter in parameters), "there are none yet"
    sums.add(0, 0, [(one, torch.full((2,), 5.0)), (hooked, torch.full((2,), 7.0))])
    with pytest.raises(KeyError), sums.lent(0, 1):
        (3 * one + 2 * other + hooked).sum().backward()
        raise KeyError
    assert one.grad is None and other.grad.tolist() == [2, 2] and hooked.grad.tolist() == [1, 1]
    assert sums.sum(WHOLE).tolist() == [8, 8, 0, 0, 7, 7]


def test_each_layer_of_each_micro_batch_draws_numbers_of_its_own():
    """Were they those of another layer, dropout would be equal with lent layers and without, and worse."""
    drawn: list[int] = []
    site = site_of(PlainStage(nn.Linear(1, 1)))
    site.framework.generators.seed = drawn.append  # type: ignore[method-assign]

    def running(chunk, span, seed):
        seed(3)
        seed(4)
        return nullcontext()

    loans = SimpleNamespace(span=lambda chunk, microbatch: HOME, running=running)
    attempt = SimpleNamespace(_span=lambda action: (0, HOME), _shared=SimpleNamespace(loans=loans), _iteration=1,
                              _site=site)
    for pipeline, microbatch in ((0, 0), (0, 1), (1, 0)):
        Attempt._running(attempt, Action("F", pipeline, microbatch))
    assert len(set(drawn)) == len(drawn) == 6
