"""Parameters that layers of several stages of a DeepSpeed pipeline share."""

from __future__ import annotations

import deepspeed
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import TiedLayerSpec

from megatron_recycle.runtime.stage import Tie


def tied_stages(module: deepspeed.PipelineModule) -> tuple[tuple[int, ...], ...]:
    """Groups of stages that wait for each other before they step, since tied layers live in several of them: the same
    on all workers. Layers that have a stage in common make one group of all their stages."""
    stages: dict[str, set[int]] = {}
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            stages.setdefault(spec.key, set()).add(module.stage_owner(index))
    groups: list[set[int]] = []
    for of_layer in stages.values():
        apart = [group for group in groups if not group & of_layer]
        groups = [*apart, of_layer.union(*(group for group in groups if group & of_layer))]
    return tuple(sorted(tuple(sorted(group)) for group in groups if len(group) > 1))


def ties_of(engine: PipelineEngine) -> list[Tie]:
    """This stage's copies of tied parameters, in the same order on all stages."""
    topology, module, found, first = engine.grid.topology(), engine.module, [], 0
    specs = {spec.key: spec for spec in module._layer_specs if isinstance(spec, TiedLayerSpec)}
    for key in sorted(specs):  # also those of other stages, whose numbers this one leaves out
        comm = module.tied_comms.get(key, {"ranks": (), "weight_attr": ()})
        stages = tuple(sorted(topology.get_coord(rank).pipe for rank in comm["ranks"]))
        found += [Tie(module._recursive_getattr(module.tied_modules[key], name), stages, first=True, number=number)
                  for number, name in enumerate(comm["weight_attr"], first) if len(stages) > 1]
        first += len(specs[key].tied_weight_attr)
    return found
