"""Changes that a script may not make between two iterations of a DeepSpeed job, refused by name.

Other changes are followed: see `DeepSpeedStage.look` and docs/between-iterations.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.compute.data import DatasetSource, DataSource
from megatron_recycle.runtime.compute.random_state import Generators


def sizes(engine: PipelineEngine) -> dict[str, int]:
    """The numbers that decide the data of an iteration, by their names in DeepSpeed's configuration."""
    return {"train_batch_size": engine.train_batch_size(),
            "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "micro_batches": engine.micro_batches, "micro_batch_size": engine.micro_batch_size}


def refuse_another(name: str, asked: int, now: int) -> None:
    """Raises UnsupportedError if ``asked`` differs from ``now``, the number at the start of training."""
    if asked != now:
        raise UnsupportedError(f"{name} cannot become {asked}: it was {now} when training began, and who trains on "
                               "what depends on it for the whole job. Keep it, or save a checkpoint, and go on from "
                               "that in a new job with the other number")


def refuse_other_sizes(engine: PipelineEngine, before: Mapping[str, int]) -> None:
    """Raises UnsupportedError if the engine's `sizes` differ from those at the start of training."""
    for name, now in sizes(engine).items():
        refuse_another(name, now, before[name])


def settle_when_asked(model: nn.Module, optimizer: torch.optim.Optimizer, settle: Callable[[], None]) -> None:
    """Call ``settle()`` before any read or write of parameters through ``model`` or a part of it, or of the state of
    model or optimizer."""
    for register in (optimizer.register_state_dict_pre_hook, optimizer.register_load_state_dict_pre_hook):
        register(lambda *_: settle())
    methods = [(name, _settled(name, settle)) for name in _ASKED]
    for module in model.modules():
        for name, method in methods:
            setattr(module, name, MethodType(method, module))  # torch.compile() looks behind bound methods


_ASKED = ("named_parameters", "named_modules", "state_dict", "load_state_dict")
"""Methods of a module; `parameters()` and `modules()` call the first two. A caller that walks modules may be about to
read weights, or to replace them."""


def _settled(name: str, settle: Callable[[], None]) -> Callable[..., Any]:
    """The method ``name`` of a module's class, preceded by ``settle()``."""
    def method(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        settle()
        return getattr(type(module), name)(module, *arguments, **keywords)

    method.__name__ = name  # pickled modules have the class's name for it
    return method


def check_data(engine: PipelineEngine, generators: Generators, plain: DataSource, data: DataSource,
               first: int) -> None:
    """Check the data of an iteration before it is trained: ``data`` made from ``plain``, from micro-batch ``first`` on.
    Raises DataError."""
    count = engine.micro_batches
    if isinstance(plain, DatasetSource) and plain.has_short(first, count) and engine.num_stages > 1 and (
            engine.is_first_stage() or engine.is_last_stage()):
        with generators.kept():  # the script's random numbers stay as they are
            plain.check(first, count, data.batch)
