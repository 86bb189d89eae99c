"""Relayout: a model that DeepSpeed has built for one chunk per stage becomes a V of two, before there is an engine.

Its first weights are those of the job without chunks, bit for bit: each layer's tensors travel from the stage that
built it to its new stage. That stage builds the layer anew, and restores the random generators. A script's changes to a
layer travel if they are in tensors (values, types, what is trained); anything else is refused, on all ranks alike.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.module import TiedLayerSpec
from torch import nn

from megatron_recycle.backends.deepspeed.chunks import Chunks, become_chunked, chunks_of, v_placement
from megatron_recycle.backends.deepspeed.layer_moves import (
    LOSS,
    PARAMETER,
    Move,
    Told,
    built_alike,
    describe,
    differs,
    groups_apart,
    ids,
    layer_weights,
    moves_of,
    name_of,
    put,
    put_same,
    tensors,
    tied,
    words,
)
from megatron_recycle.backends.deepspeed.regroup import Groups
from megatron_recycle.backends.patching import replaced
from megatron_recycle.config import SECTION
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan.value import read_as
from megatron_recycle.runtime.compute.random_state import Generators
from megatron_recycle.runtime.setup_record import SetUp

_METHOD, _ORDER, _LEFT = "recycle_partition_method", "recycle_stock_order", "recycle_left"
_OFF = f'or leave chunks out ("{SECTION}": {{"chunks": 1}}), which trains as DeepSpeed cuts the model'


def remember_method(module: PipelineModule, method: str) -> None:
    """Note that ``module`` was cut by ``method``, which DeepSpeed does not keep."""
    setattr(module, _METHOD, method)


def lay_out(module: PipelineModule, optimizer: Any, model_parameters: Any,
            setup: SetUp | None = None) -> tuple[Any, Any]:
    """Lay the layers of ``module`` into a V of two chunks per stage; all ranks call this. Weights and buffers keep
    their bits.

    ``optimizer``, if it is one, and ``model_parameters``, as the script gives them to `deepspeed.initialize()`, follow
    the layers, in the script's own lists. A joiner takes the layout from ``setup``, the record of the job's start, and
    waits for no other process: its peers send the state later.

    Returns ``optimizer`` and ``model_parameters`` for the engine. Raises UnsupportedError listing all that cannot move.
    """
    if chunks_of(module) is not None:  # a second initialize()
        return optimizer, model_parameters
    _check_alone(module)
    groups = Groups(optimizer, model_parameters)
    own, faults = _layers(module)
    joins, makes = True, callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer)

    def find() -> Any:
        nonlocal joins
        joins = False
        descriptions = _gather(module, _description(module, own, groups, faults))
        wrong = [fault for one in descriptions for fault in one.faults] or groups_apart(descriptions)
        weights = layer_weights(module._layer_specs, descriptions)
        chunks = Chunks(_cut(module, weights), v_placement(module.num_stages), tuple(map(int, module.parts)))
        wrong += [f"chunk {chunk} of {len(chunks.placement)} would have no layers: take another partition_method"
                  for chunk, one in enumerate(pairwise(chunks.parts)) if one[0] == one[1]]
        moves = moves_of(module._layer_specs, chunks, descriptions, wrong)
        _agree(module, wrong, chunks.parts)
        sources = {move.source for move in moves if move.target == module.stage_id}
        order = {} if makes else {str(one): descriptions[one].members for one in sorted(sources)}
        return {"parts": chunks.parts, "order": order, "moves": [
            move for move in moves if module.stage_id in (move.source, move.target)]}

    with setup.apart() if setup is not None else contextlib.nullcontext():
        found = setup.note("the layout of chunks", find) if setup is not None else find()
        chunks = Chunks(tuple(found["parts"]), v_placement(module.num_stages), tuple(map(int, module.parts)))
        moves: list[Move] = read_as(list[Move], found["moves"])
        wrong: list[str] = []
        held = _carry_out(module, moves, own, wrong, joins)
        if not joins:
            _agree(module, wrong, ())
    _follow(module, moves, own, held, groups, chunks)
    setattr(module, _ORDER, {int(stage): members for stage, members in found["order"].items()})
    _say(module, chunks)
    return _checked(optimizer) if makes else optimizer, groups.model_parameters


def stock_order(module: PipelineModule) -> dict[int, list[list[str | None]]]:
    """Parameter names of each optimizer group, in order, as stages would have them without chunks. Only for the stages
    that built layers of this one."""
    found: dict[int, list[list[str | None]]] = getattr(module, _ORDER)
    return found


def _check_alone(module: PipelineModule) -> None:
    """Raises UnsupportedError for faults that all ranks see without communication."""
    layers, stages = len(module._layer_specs), module.num_stages
    if hasattr(module, "phase_bounds"):
        reason = "a DualPipeVModule has two chunks of its own: build a PipelineModule"
    elif stages < 2:
        reason = "the model has one stage, on which two chunks are as good as one: leave it out"
    elif layers < 2 * stages:
        reason = (f"the model has {layers} layers for {2 * stages} chunks: give PipelineModule a list of finer ones, "
                  "use fewer stages, or leave it out")
    elif getattr(module, _METHOD, None) is None:
        reason = "PipelineModule was built before megatron_recycle.enable(): call that first"
    else:
        return
    raise UnsupportedError(f"megatron-recycle: chunks 2: {reason}")


def _layers(module: PipelineModule) -> tuple[dict[str, nn.Module], list[str]]:
    """The layers of this stage as DeepSpeed has built them, and faults: changes that other stages would not know."""
    found: dict[str, nn.Module] = {}
    faults: list[str] = []
    for place, number in enumerate(range(module._local_start, module._local_stop)):
        spec, function = module._layer_specs[number], module.forward_funcs[place]
        name = name_of(number, spec)
        if name is None:
            built, known = spec, function is spec
        elif isinstance(spec, TiedLayerSpec):
            built = found[name] = module.tied_modules[spec.key]
            known = function is built or getattr(function, "args", (None,))[0] is built
        else:
            built = found[name] = module._modules[name]
            known = function is built
        if not known:
            faults.append(f"layer {number} was put in another's place in forward_funcs: do it in the list of layers")
    if isinstance(module.loss_fn, nn.Module):
        found[LOSS] = module.loss_fn
    known_names = {"tied_modules", LOSS, *found}
    for name, child in module.named_children():
        if name not in known_names and tensors(child):
            faults.append(f"the model's {name} ({type(child).__name__}) is no layer of its list: put it there")
    faults += [f"the model's own {name} belongs to no layer of its list: put it there"
               for name in (*module._parameters, *module._buffers)]
    return found, faults


def _description(module: PipelineModule, own: Mapping[str, nn.Module], groups: Groups, faults: Sequence[str]) -> Told:
    ties = {tied(key): [module._recursive_getattr(one, name) for name in module.tied_weight_attrs[key]]
            for key, one in module.tied_modules.items()}
    names = {id(one): name for name, one in module.named_parameters()}
    members = [[names.get(id(one)) for one in group] for group in groups.members]
    members = members if groups.given else [list(names.values())]
    prefix = f"stage {module.stage_id}: "
    return Told(describe(own, groups.places, ties), groups.given, groups.settings, members,
                [*(prefix + fault for fault in faults), *filter(None, [groups.trouble])])


def _gather(module: PipelineModule, description: Told) -> list[Told]:
    """The descriptions sent by all stages of this pipeline."""
    group = module._grid.get_pipe_parallel_group()
    found: list[Any] = [None] * module.num_stages
    dist.all_gather_object(found, msgspec.json.encode(description), group=group)
    return [read_as(Told, json.loads(one)) for one in found]


def _agree(module: PipelineModule, wrong: Sequence[str], parts: Sequence[int]) -> None:
    """Raises UnsupportedError on all ranks with the faults of any (``wrong``), or if they do not cut alike."""
    found: list[Any] = [None] * module.world_size
    dist.all_gather_object(found, (list(wrong), list(parts)), group=module.world_group)
    faults = list(dict.fromkeys(fault for one, _ in found for fault in one))
    if not faults and any(one != found[0][1] for _, one in found):
        faults = ["the pipelines have layers of other sizes: build the same model on all ranks"]
    _refuse(faults)


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise UnsupportedError("\n- ".join(["megatron-recycle: chunks 2: the layers cannot be laid out:", *faults])
                               + f"\nDo so, {_OFF}.")


def _cut(module: PipelineModule, weights: Sequence[int]) -> tuple[int, ...]:
    """Bounds of two chunks per stage, by the script's partition method and DeepSpeed's code for it."""
    kept = {name: getattr(module, name) for name in ("parts", "_local_start", "_local_stop")}
    # Stock would build the whole model to count, and would print chunks as stages.
    with (replaced(module, **kept, num_stages=2 * module.num_stages, _count_layer_params=lambda: list(weights)),
          contextlib.redirect_stdout(io.StringIO())):
        module._partition_layers(method=getattr(module, _METHOD))
        parts = tuple(map(int, module.parts))
    if len(parts) != 2 * module.num_stages + 1:
        raise UnsupportedError(f"megatron-recycle: chunks 2: {type(module).__name__}._partition_layers() gives "
                               f"{len(parts) - 1} parts where num_stages is {2 * module.num_stages} for the moment: "
                               f"let it go by num_stages, {_OFF}")
    return parts


def _carry_out(module: PipelineModule, moves: Sequence[Move], own: Mapping[str, nn.Module], wrong: list[str],
               joins: bool) -> dict[str, nn.Module]:
    """Send and receive layers, one at a time; returns this stage's new layers. Adds differences from a layer's
    description to ``wrong``. A joiner, for which no other process waits, raises UnsupportedError with them."""
    held, twice = dict[str, nn.Module](), dict[tuple[int, int], nn.Module]()
    grid, stage = module._grid, module.stage_id
    device = torch.device(get_accelerator().device_name(module.local_rank))
    generators = Generators(device)
    generators.adopt_trackers()
    for move in moves:  # the same order on all stages, so that there is no deadlock
        name = move.layer.name
        if move.source == move.target:
            held[name] = own[name]
        elif move.source == stage and not joins:
            for _, one in tensors(own[name]).values():
                _send(one.detach().to(device), grid.pp_group[move.target], grid.get_pipe_parallel_group())
        elif move.target == stage:
            try:
                with generators.kept():
                    built = _built(module, name)
                    if (alias := twice.get((id(built), move.source))) is not None:
                        built = alias
                    elif name != LOSS and ids([built]) & ids((*own.values(), *held.values())):
                        # It is several times in the list; in stock, several stages have one each.
                        built = twice[id(built), move.source] = copy.deepcopy(built)
                    else:
                        twice[id(built), move.source] = built
                    built.to(device)
                unlike = differs(built, move.layer)
            except Exception as error:  # noqa: BLE001 - whatever it is: the others wait for this stage
                built, unlike = nn.Module(), f"an error where it is built anew ({type(error).__name__}: {error})"
            for piece in move.layer.pieces:
                if not joins:
                    value = torch.empty(piece.shape, dtype=getattr(torch, piece.dtype), device=device)
                    _receive(value, grid.pp_group[move.source], grid.get_pipe_parallel_group())
                elif not unlike:
                    value = attrgetter(piece.path)(built).detach().to(getattr(torch, piece.dtype))
                if not unlike:
                    put(built, piece, value)
            if not unlike and not built_alike(built, move.layer):
                unlike = "other modules, types or plain attributes"
            if unlike:
                wrong.append(f"{words(name)} has {unlike} on stage {stage} than on stage {move.source}, where "
                             "PipelineModule has built it and the script may have changed it: let both build the "
                             "same, or change layers after deepspeed.initialize()")
            held[name] = built
    _share([move for move in moves if move.target == stage], held, wrong)
    _refuse(wrong if joins else [])
    return held


def _share(moves: Sequence[Move], held: Mapping[str, nn.Module], wrong: list[str]) -> None:
    """Make tensors that were shared on their stage shared here. Adds to ``wrong`` those that are shared only here."""
    first: dict[tuple[int, int], torch.Tensor] = {}
    owners: dict[int, tuple[tuple[int, int], str]] = {}
    for move in moves if not wrong else ():
        for piece in move.layer.pieces:
            key, layer = (move.source, piece.same), held[move.layer.name]
            tensor = attrgetter(piece.path)(layer)
            if key in first and first[key] is not tensor:
                put_same(layer, piece.path, first[key])
                tensor = first[key]
            first.setdefault(key, tensor)
            other, name = owners.setdefault(id(tensor), (key, move.layer.name))
            if other != key:
                wrong.append(f"{words(name)} and {words(move.layer.name)} are one tensor ({piece.path}) where one "
                             "stage has both, and two where DeepSpeed cuts the model: tie them by TiedLayerSpec, or "
                             "give each its own")


def _built(module: PipelineModule, name: str) -> nn.Module:
    spec = module.loss_fn if name == LOSS else next(
        spec for number, spec in enumerate(module._layer_specs) if name_of(number, spec) == name)
    built: nn.Module = spec if isinstance(spec, nn.Module) else spec.build()
    return built


def _send(tensor: torch.Tensor, rank: int, group: Any) -> None:
    if tensor.numel():
        dist.send(tensor.contiguous().reshape(-1).view(torch.uint8), rank, group=group)


def _receive(tensor: torch.Tensor, rank: int, group: Any) -> None:
    if tensor.numel():
        dist.recv(tensor.reshape(-1).view(torch.uint8), rank, group=group)


def _follow(module: PipelineModule, moves: Sequence[Move], own: dict[str, nn.Module], held: dict[str, nn.Module],
            groups: Groups, chunks: Chunks) -> None:
    """Put the layers ``held`` in place of the stage's ``own``, and let the optimizer's groups follow."""
    gone = {name: layer for name, layer in own.items() if name != LOSS and held.get(name) is not layer}
    _install(module, chunks, held)
    order = list(module.parameters())
    arrived = {id(one): (one, piece.group, piece.called) for move in moves
               if move.target == module.stage_id != move.source for piece in move.layer.pieces
               if piece.kind == PARAMETER and isinstance(one := attrgetter(piece.path)(held[move.layer.name]),
                                                         nn.Parameter)}
    left = {id(one) for layer in gone.values() for one in layer.parameters()} - set(map(id, order))
    groups.follow(left, list(arrived.values()), order)
    _let_go(module, gone, own)


def _install(module: PipelineModule, chunks: Chunks, held: Mapping[str, nn.Module]) -> None:
    for name in [name for name in module._modules if name.isdigit()]:
        del module._modules[name]
    module.tied_modules.clear()
    module.tied_weight_attrs, module.forward_funcs, module.fwd_map = {}, [], {}
    for place, number in enumerate(chunks.layers(module.stage_id)):
        spec = module._layer_specs[number]
        name = name_of(number, spec)
        layer = spec if name is None else held[name]
        if isinstance(spec, TiedLayerSpec):
            module.tied_modules[spec.key] = layer
            module.tied_weight_attrs[spec.key] = spec.tied_weight_attr
            layer = layer if spec.forward_fn is None else partial(spec.forward_fn, layer)
        elif name is not None:
            module.add_module(name, layer)
            module.fwd_map[name] = place
        module.forward_funcs.append(layer)
    for one in module.parameters():
        one.ds_pipe_replicated = False
    module.tied_comms = {}  # tied layers are on one stage
    become_chunked(module, chunks)
    module.parts = list(chunks.parts)
    first = chunks.ranges(module.stage_id)[0]
    module._set_bounds(first.start, first.stop)
    module.is_checkpointable_results, module.is_checkpointable_results_interval = [], None
    module._precompute_checkpointable_values()


def _let_go(module: PipelineModule, gone: dict[str, nn.Module], own: dict[str, nn.Module]) -> None:
    """Forget the layers that have left. Warn of those that the script still holds: its changes to them are lost."""
    for name, layer in gone.items():
        layer.apply(partial(_mark, words(name)))
    specs = module._layer_specs
    listed = [layer for name, layer in gone.items() if name.isdigit() and isinstance(specs[int(name)], nn.Module)]
    stays = {id(one) for one in module.parameters()}
    for layer in listed:
        if not any(id(one) in stays for one in layer.parameters()):
            layer.to("cpu")  # the list holds it on all stages
    left = {name: [weakref.ref(one) for one in (layer, *layer.parameters())] for name, layer in gone.items()
            if layer not in listed}
    listed.clear()
    gone.clear()
    own.clear()
    layer = None  # the loop's last one
    gc.collect()
    kept = [words(name) for name, found in left.items() if any(one() is not None for one in found)]
    if kept:
        get_logger().warning(
            "megatron-recycle: chunks 2: the script holds %s of stage %d, or a parameter of it, from before "
            "deepspeed.initialize(): another stage trains it from now on, and what is done to this copy has no effect. "
            "Take references from the engine's module instead", ", ".join(kept), module.stage_id)


def _mark(layer: str, part: nn.Module) -> None:
    for one in part._parameters.values():
        if one is not None:
            setattr(one, _LEFT, layer)


def _checked(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make``, with a check that its optimizer has no layers that have left."""
    @functools.wraps(make, updated=())
    def checked(*arguments: Any, **keywords: Any) -> Any:
        made = make(*arguments, **keywords)
        left = {getattr(one, _LEFT) for group in made.param_groups for one in group["params"] if hasattr(one, _LEFT)}
        if left:
            raise UnsupportedError(f"megatron-recycle: chunks 2: the optimizer has parameters of "
                                   f"{', '.join(sorted(left))}, which another stage trains: make it of the parameters "
                                   "that it is called with")
        return made

    return checked


def _say(module: PipelineModule, chunks: Chunks) -> None:
    if module.global_rank == 0:
        get_logger().info("megatron-recycle: chunks 2: %s", "; ".join(
            f"stage {stage}: layers " + " and ".join(f"{one.start}-{one.stop - 1}" for one in chunks.ranges(stage))
            for stage in range(module.num_stages)))
