"""An optimizer's state in checkpoints, by the names of its parameters.

Stock numbers a stage's parameters: a stage with other layers of the same shapes would load wrong moments without
notice. With two chunks stages have other layers than without. So the state is then written by name, in the same files,
under a key that makes stock fail. Here both forms are read, with and without chunks: a stage takes its parts from the
files of all stages that had them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from megatron_recycle.backends.deepspeed.chunks import Chunks, chunks_of
from megatron_recycle.backends.deepspeed.layer_moves import name_of
from megatron_recycle.backends.deepspeed.masters import INNER, MASTERS
from megatron_recycle.backends.deepspeed.relayout import stock_order
from megatron_recycle.backends.patching import replaced
from megatron_recycle.errors import RecycleError

KEY = "recycle_by_layer"
_OF_GROUP = ("params", "param_names")
_ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "exp_inf",
                "sum")
"""Entries of torch's optimizers with their parameter's shape."""

Names = Sequence[Sequence[str | None]]
"""The parameters' names in each group, in order; None: not the model's."""


def written(engine: PipelineEngine, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``state`` of the engine's optimizer, in the form of a checkpoint."""
    chunks = chunks_of(engine.module)
    if chunks is None:
        return state
    files = {name: _file(engine, chunks.stage_of(number)).name for name, number in _layers(engine).items()}
    return {KEY: {**_by_name(state, _names(engine)), "files": files, "part": _part(engine)}}


def written_shard(engine: PipelineEngine, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A shard's ``state``, in the form of a checkpoint: not for stages with other layers."""
    chunks = chunks_of(engine.module)
    return state if chunks is None else {KEY: {"parts": chunks.parts, "shard": state}}


def read_shard(engine: PipelineEngine, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The shard's state, as given to `written_shard`. Raises RecycleError if it is of stages with other layers."""
    chunks = chunks_of(engine.module)
    parts = state[KEY]["parts"] if KEY in state else None
    if parts != (None if chunks is None else chunks.parts):
        raise RecycleError("the checkpoint's ZeRO-1 shards are of stages with other layers: "
                           f"{_cut(parts)} there, {_cut(None if chunks is None else chunks.parts)} here. Load it with "
                           "load_optimizer_states=False, or go on with the chunks that it was written with")
    return state if chunks is None else state[KEY]["shard"]


def reading(engine: PipelineEngine, *arguments: Any, **keywords: Any) -> AbstractContextManager[None]:
    """Inside the block the engine loads a checkpoint (``arguments`` of its `_load_checkpoint`), and finds the
    optimizer's state by this stage's own numbers, in whichever form it was written. Otherwise RecycleError."""
    bound = inspect.signature(PipelineEngine._load_checkpoint).bind(engine, *arguments, **keywords)
    bound.apply_defaults()
    given, writer = bound.arguments, engine.checkpoint_engine
    stock, folder = writer.load, Path(given["load_dir"], given["tag"])
    wanted = given["load_optimizer_states"] and not given["load_module_only"] and engine.optimizer is not None

    def load(path: Any, *rest: Any, **others: Any) -> Any:
        found = stock(path, *rest, **others)
        if (wanted and Path(path).parent == folder and Path(path).name.startswith("mp_rank_")
                and found.get("optimizer") is not None):
            found["optimizer"] = _own(engine, found["optimizer"], folder,
                                      lambda name: stock(str(folder / name), map_location="cpu")["optimizer"])
        return found

    return replaced(writer, load=load)


def _own(engine: PipelineEngine, state: Mapping[str, Any], folder: Path,
         load: Callable[[str], Mapping[str, Any]]) -> Mapping[str, Any]:
    """The state of this stage's parameters by its own numbers, from its own file and other stages'."""
    chunks = chunks_of(engine.module)
    if KEY in state:
        own, read_other = state[KEY], lambda name: load(name)[KEY]
        files = own["files"]
        if own["part"] != _part(engine):
            raise RecycleError(f"the checkpoint in {folder} was written with another number of tensor-parallel parts: "
                               "load it with load_optimizer_states=False")
    elif chunks is None:
        return state  # both as stock
    else:
        own, files, read_other = _of_stock(engine, chunks, folder, load)

    @functools.cache
    def entry(file: str) -> Mapping[str, Any]:
        return read_other(file)

    parameters = dict(engine.module.named_parameters())
    numbers, numbered, masters = 0, dict[Any, Any](own["other"]), list[list[torch.Tensor]]()
    groups = list[dict[str, Any]]()
    current = engine.optimizer.param_groups
    for settings, names, group in zip(own["groups"], _names(engine), current, strict=True):
        masters.append([])
        groups.append({**settings, "params": [*range(numbers, numbers + len(names))],
                       **({"param_names": group["param_names"]} if "param_names" in group else {})})
        for number, name in enumerate(names, numbers):
            file = files.get(_layer(name)) if name is not None else None
            source = own if file is None else entry(file)
            if name not in source["names"]:
                raise RecycleError(f"the checkpoint in {folder} has no optimizer state of {name}: it was written by "
                                   "another model, or by another optimizer's groups. Load it with "
                                   "load_optimizer_states=False")
            if name is not None and name in source["state"]:
                numbered[number] = source["state"][name]
                _check_shapes(name, numbered[number], parameters, folder)
            if name in source["masters"]:
                masters[-1].append(source["masters"][name])
        numbers += len(names)
    inner = {**own["inner"], "state": numbered, "param_groups": groups}
    return inner if own["outer"] is None else {**own["outer"], INNER: inner, MASTERS: masters}


def _of_stock(engine: PipelineEngine, chunks: Chunks, folder: Path, load: Callable[[str], Mapping[str, Any]]) -> tuple[
        Mapping[str, Any], dict[str, str], Callable[[str], Mapping[str, Any]]]:
    """For a checkpoint without chunks: one entry that this stage needs, the file of each layer, and a function that
    reads one. The meaning of its numbers is known from this job's stages at the start."""
    files, order = len(engine._get_all_ckpt_names(str(folder.parent), folder.name)), stock_order(engine.module)
    reason = ("another number of stages" if files != engine.mp_world_size else
              "an optimizer that the script's own function groups" if not order else "")
    if reason:
        raise RecycleError(f"the optimizer state in {folder} is of a job without chunks and with {reason}, whose "
                           "numbers cannot be told apart here: load it with load_optimizer_states=False, or go on "
                           "without chunks")
    stages = {_file(engine, stage).name: stage for stage in order}
    file_names: dict[str, str] = {}
    for name, number in _layers(engine).items():
        if (stage := chunks.stock_stage_of(number)) in order:
            file_names[name] = _file(engine, stage).name

    def read(file: str) -> Mapping[str, Any]:
        try:
            return _by_name(load(file), order[stages[file]])
        except ValueError as error:
            raise RecycleError(f"{folder / file} has other parameters than this model's stage {stages[file]}: it was "
                               "written by another model, or one that was cut otherwise. Load it with "
                               "load_optimizer_states=False") from error

    first = _file(engine, min(order)).name
    return read(first), file_names, read


def _by_name(state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """A state in stock's form, by ``names``. Raises ValueError if their numbers differ."""
    outer = None
    if INNER in state:
        outer = {key: value for key, value in state.items() if key not in (INNER, MASTERS)}
    inner, masters = (state, None) if outer is None else (state[INNER], state[MASTERS])
    numbers = {number: name for group, own in zip(inner["param_groups"], names, strict=True)
               for number, name in zip(group["params"], own, strict=True)}
    return {
        "names": [*numbers.values()], "outer": outer,
        "inner": {key: value for key, value in inner.items() if key not in ("state", "param_groups")},
        "groups": [{key: value for key, value in group.items() if key not in _OF_GROUP}
                   for group in inner["param_groups"]],
        "state": {numbers[number]: value for number, value in inner["state"].items() if number in numbers},
        "other": {key: value for key, value in inner["state"].items() if key not in numbers},
        "masters": {} if masters is None else {name: value for own, values in zip(names, masters, strict=True)
                                               for name, value in zip(own, values, strict=True)}}


def _names(engine: PipelineEngine) -> Names:
    """The parameters' names in each of the optimizer's groups."""
    names = {id(one): name for name, one in engine.module.named_parameters()}
    copies = engine.masters.masters if engine.masters is not None else {}
    names |= {id(master): names[id(one)] for one, master in copies.items() if id(one) in names}
    return [[names.get(id(one)) for one in group["params"]] for group in engine.optimizer.param_groups]


def _layers(engine: PipelineEngine) -> dict[str, int]:
    """The first number in the model's list of each layer, by the layer's name in parameter names."""
    found: dict[str, int] = {}
    for number, spec in enumerate(engine.module._layer_specs):
        if (name := name_of(number, spec)) is not None:
            found.setdefault(name, number)
    return found


def _layer(name: str) -> str:
    """The layer's name in the parameter's ``name``."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first == "tied_modules" else first


def _file(engine: PipelineEngine, stage: int) -> Path:
    """The file with the optimizer's state of ``stage``, of this worker's tensor-parallel part."""
    grid = engine.grid
    ranks = sorted(grid.topology().get_axis_list(axis="data", idx=grid.get_data_parallel_id()))
    number = ranks.index(grid.stage_to_global(stage_id=stage))
    return Path(engine._get_ckpt_name("", "", mp_placeholder=f"{number:02d}"))


def _part(engine: PipelineEngine) -> list[int]:
    return [engine.grid.get_slice_parallel_rank(), engine.grid.get_slice_parallel_world_size()]


def _check_shapes(name: str, state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor], folder: Path) -> None:
    wrong = [key for key in _ELEMENTWISE if isinstance(one := state.get(key), torch.Tensor)
             and one.dim() and one.shape != parameters[name].shape]
    if wrong:
        raise RecycleError(f"the {wrong[0]} of {name} in {folder} is not of its shape: the checkpoint was written by "
                           "another model, or one that was cut otherwise. Load it with load_optimizer_states=False")


def _cut(parts: Sequence[int] | None) -> str:
    return "one chunk per stage" if parts is None else f"chunks that begin at layers {', '.join(map(str, parts[:-1]))}"
