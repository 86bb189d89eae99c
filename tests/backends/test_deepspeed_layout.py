"""The layers of a DeepSpeed model whose stages get two chunks: where they go, and what checkpoints say of them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec
from torch import nn
from torch.nn import functional

from megatron_recycle.backends.deepspeed.chunks import Chunks, v_placement
from megatron_recycle.backends.deepspeed.layer_moves import (
    Move,
    Told,
    describe,
    differs,
    groups_apart,
    layer_weights,
    moves_of,
    name_of,
    put,
    tied,
)
from megatron_recycle.backends.deepspeed.regroup import Groups
from megatron_recycle.backends.deepspeed.relayout import _carry_out
from megatron_recycle.backends.deepspeed.running import Running
from megatron_recycle.errors import UnsupportedError
from tests.backends import gpt_job
from tests.harness import Result
from tests.references import run

PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


def arguments(precision: str, chunks: int, **options: Any) -> dict[str, Any]:
    engine = {**PRECISIONS[precision], "gradient_clipping": 0.0, "pipeline": {"use_reentrant": False},
              "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 20}}}
    return {"pipelines": 1, "stages": 2, "dropout": 0.0, "tied": True, "engine_settings": engine,
            "settings": {"reduction": "exact", "chunks": chunks}, **options}


def weights(results: dict[int, Result]) -> dict[str, bytes]:
    return {name: value.tobytes() for result in results.values() for name, value in result.value["parameters"].items()}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.night)])
def test_a_run_goes_on_with_two_chunks_and_back_with_one_and_has_the_bits_of_one_that_was_not_stopped(
        precision, tmp_path):
    flat, bent = str(tmp_path / "flat"), str(tmp_path / "bent")
    unbroken = run(gpt_job.train, 2, arguments(precision, 1, iterations=4, save=(flat, 2)))
    run(gpt_job.train, 2, arguments(precision, 2, iterations=1, load=(flat, {}), save=(bent, 1)))
    back = run(gpt_job.train, 2, arguments(precision, 1, iterations=1, load=(bent, {})))
    assert back[0].value["losses"] == unbroken[0].value["losses"][3:]
    assert weights(back) == weights(unbroken)


CUT = Chunks(parts=(0, 1, 2, 3, 4), placement=v_placement(2), stock=(0, 2, 4))
"""Four layers: of two stages 0 and 1, 2 and 3; as a V 0 and 3, 1 and 2."""


def told_of(specs: Sequence[Any], change: Callable[[dict[str, nn.Module]], None] = lambda layers: None) -> list[Told]:
    """What two stages tell that have built ``specs`` as stock does."""
    told = []
    for stage in range(2):
        layers: dict[str, nn.Module] = {}
        for number in (2 * stage, 2 * stage + 1):
            if (name := name_of(number, specs[number])) is not None and name not in layers:
                torch.manual_seed(0 if name.startswith("tied") else number)
                layers[name] = specs[number] if isinstance(specs[number], nn.Module) else specs[number].build()
        change(layers)
        ties = {name: [layer.weight] for name, layer in layers.items() if name.startswith("tied")}
        told.append(Told(describe(layers, {}, ties), False, [], [], []))
    return told


def linear() -> LayerSpec:
    return LayerSpec(nn.Linear, 2, 2)


def words(forward: Any = None) -> TiedLayerSpec:
    return TiedLayerSpec("words", nn.Linear, 2, 2, forward_fn=forward)


def hook(layers: dict[str, nn.Module]) -> None:
    for layer in layers.values():
        layer.register_forward_hook(lambda *_: None)


def share(layers: dict[str, nn.Module]) -> None:
    if {"2", "3"} <= layers.keys():
        layers["3"].weight = layers["2"].weight


def again(layers: dict[str, nn.Module]) -> None:
    nn.init.constant_(layers[tied("words")].weight, float("1" in layers))


def test_layers_move_from_the_stage_that_has_built_them_and_a_tied_one_is_one():
    specs = [words(), linear(), linear(), words(lambda module, x: x @ module.weight)]
    wrong: list[str] = []
    moves = moves_of(specs, CUT, told_of(specs), wrong)
    assert [(move.layer.name, move.source, move.target) for move in moves] == [
        (tied("words"), 0, 0), ("1", 0, 1), ("2", 1, 1)]
    assert not wrong
    assert layer_weights(specs, told_of(specs)) == [6, 6, 6, 6]


@pytest.mark.parametrize(("specs", "change", "said"), [
    ([linear() for _ in range(4)], hook, ["layer 1 has hooks", "layer 3 has hooks"]),
    ([linear() for _ in range(4)], share, ["layer 2 and layer 3 share a tensor and end up on stages 1 and 0"]),
    ([words(), words(), linear(), linear()], None, ["'words' ends up on stages 0 and 1"]),
    ([words(), linear(), linear(), words()], None, ["'words' has parameters that are not tied (bias)"]),
    ([words(), linear(), linear(), words(max)], again, ["'words' differs between the stages that have it"]),
    ([linear(), linear(), linear(), partial(max, nn.Linear(2, 2))], None,
     ["layer 3 is a function that holds a module (Linear)"]),
    ([linear(), abs, linear(), abs], None, []),
])
def test_what_cannot_move_is_refused_by_name(specs: Any, change: Any, said: list[str]):
    wrong: list[str] = []
    moves_of(specs, CUT, told_of(specs, change or (lambda layers: None)), wrong)
    assert len(wrong) == len(said)
    assert all(one in found for one, found in zip(said, wrong, strict=True))


def test_a_layer_that_is_built_anew_gets_the_bits_and_types_that_it_had_and_what_is_else_is_found():
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    old.bfloat16().weight.requires_grad_(False)
    (told,) = describe({"1": old}, {}, {})
    assert not differs(new, told)
    for piece in told.pieces:
        put(new, piece, getattr(old, piece.path).detach().clone())
    assert [(one.dtype, one.requires_grad) for one in new.parameters()] == [
        (torch.bfloat16, False), (torch.bfloat16, True)]
    assert all(torch.equal(one, other) for one, other in zip(new.parameters(), old.parameters()))
    assert "bias" in differs(nn.Linear(2, 2, bias=False), told)


def test_a_worker_that_comes_back_and_builds_another_layer_does_not_come_in():
    (told,) = describe({"0": nn.Linear(2, 2)}, {}, {})
    module: Any = SimpleNamespace(_grid=None, stage_id=1, local_rank=0, _layer_specs=[LayerSpec(nn.Linear, 2, 3)])
    with pytest.raises(UnsupportedError, match=r"layer 0 has other tensors \(weight, bias\) on stage 1"):
        _carry_out(module, [Move(told, 0, 1)], {}, [], joins=True)


@pytest.mark.parametrize("named", [False, True])
def test_groups_follow_in_the_scripts_own_lists(named):
    stays, leaves, comes = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    own = [*stays.named_parameters("a"), *leaves.named_parameters("b")]
    lists = [[(name, one) if named else one for name, one in own if one.dim() == dim] for dim in (2, 1)]
    optimizer = torch.optim.SGD([{"params": lists[0], "lr": 0.1}, {"params": lists[1]}], lr=0.2)
    groups = Groups(optimizer, None)
    assert [word for word in groups.settings[0] if word.startswith("lr")] == ["lr=0.1"]
    called = ("c.weight", "c.bias") if named else (None, None)
    groups.follow({id(one) for one in leaves.parameters()},
                  [(comes.weight, 0, called[0]), (comes.bias, 1, called[1])],
                  [*comes.parameters(), *stays.parameters()])
    assert [[id(one) for one in group["params"]] for group in optimizer.param_groups] == [
        [id(comes.weight), id(stays.weight)], [id(comes.bias), id(stays.bias)]]
    if named:
        assert [group["param_names"] for group in optimizer.param_groups] == [
            ["c.weight", "a.weight"], ["c.bias", "a.bias"]]


def test_groups_that_cannot_follow_are_refused():
    layer = nn.Linear(2, 2)
    stepped = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    stepped.step()
    assert "has stepped" in Groups(stepped, None).trouble
    told = [Told([], True, Groups(torch.optim.SGD(layer.parameters(), lr=rate), None).settings, [], [])
            for rate in (0.1, 0.2)]
    assert "differ (lr=0.1; lr=0.2)" in groups_apart(told)[0]
    assert not groups_apart(told[:1] * 2)


class Layers(nn.Module):
    """A stage's, as far as `Running` asks."""

    activation_checkpoint_interval, _local_start = 0, 1

    def __init__(self, *layers: Callable[..., Any]) -> None:
        super().__init__()
        self.forward_funcs, self.recycle_chunks = list(layers), CUT

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return [x := layer(x) for layer in self.forward_funcs][-1]


def test_a_chunk_may_begin_with_a_layer_that_writes_over_its_input():
    module = Layers(nn.ReLU(inplace=True), nn.Linear(2, 2))
    running = Running(SimpleNamespace(module=module, stage_id=1, has_attention_mask=False, has_bool_tensors=False))
    given = torch.tensor([[-1.0, 1.0]], requires_grad=True)
    with running.chunk(0):
        running.forward((given,), None).outputs[0].sum().backward()
    assert (given.tolist(), given.grad.tolist()) == ([[-1.0, 1.0]], [[0.0, 1.0]])


def test_a_script_may_replace_layers_but_not_put_any_in_or_take_them_out():
    module = Layers(nn.Linear(2, 2), nn.Linear(2, 2))
    running = Running(SimpleNamespace(module=module, stage_id=0))
    module.forward_funcs[1] = other = nn.Linear(2, 2)
    assert list(running.modules[1]) == [other]
    module.forward_funcs.insert(1, abs)
    with pytest.raises(UnsupportedError, match="stage 0 has 3 layers, and its two chunks have 1 and 1"):
        _ = running.modules


def test_a_layer_may_keep_its_script_s_arguments():
    """As Megatron-DeepSpeed's do: `args` is what a tied layer's function is bound to, and of others anything."""
    one, tied = nn.Linear(2, 2), nn.Linear(2, 2)
    one.args = Namespace(hidden=2)  # type: ignore[assignment]
    running = Running(SimpleNamespace(module=Layers(one, partial(functional.linear, tied)), stage_id=0))
    assert [list(modules) for modules in running.modules] == [[one], [tied]]
