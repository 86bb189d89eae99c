"""Tied layers of a DeepSpeed pipeline, as each stage sees them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.pipe.module import TiedLayerSpec
from torch import nn

from megatron_recycle.backends.deepspeed.stage import tied_stages, ties_of


def module_of(*layers: tuple[str, tuple[int, ...]]) -> Any:
    """A model of one tied layer on each stage that is named."""
    specs = [(TiedLayerSpec(key, nn.Linear, 1, 1, tied_weight_attr=["weight", "bias"]), stage)
             for key, stages in layers for stage in stages]
    return SimpleNamespace(_layer_specs=[spec for spec, _ in specs], stage_owner=lambda index: specs[index][1],
                           tied_modules={key: nn.Linear(1, 1) for key, _ in layers}, _recursive_getattr=getattr)


@pytest.mark.parametrize(("layers", "groups"), [
    ([("a", (0, 3)), ("b", (1, 2))], ((0, 3), (1, 2))),
    ([("a", (0, 3)), ("b", (0, 3))], ((0, 3),)),
    ([("a", (0, 1)), ("b", (2, 3)), ("c", (1, 2))], ((0, 1, 2, 3),)),
    ([("a", (1, 1))], ()),
])
def test_layers_with_a_stage_in_common_make_one_group_of_stages(layers: Any, groups: Any):
    assert tied_stages(module_of(*layers)) == groups


def test_a_tie_has_the_same_number_on_all_of_its_stages():
    module, found = module_of(("a", (0, 1)), ("b", (0, 2))), []
    topology = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank))
    for stage in range(3):
        module.tied_comms = {key: {"ranks": stages, "weight_attr": ["weight", "bias"]}
                             for key, stages in (("a", (0, 1)), ("b", (0, 2))) if stage in stages}
        engine: Any = SimpleNamespace(module=module, grid=SimpleNamespace(topology=lambda: topology))
        found.append([(tie.stages, tie.number) for tie in ties_of(engine)])
    of_a, of_b = [((0, 1), 0), ((0, 1), 1)], [((0, 2), 2), ((0, 2), 3)]
    assert found == [[*of_a, *of_b], of_a, of_b]
