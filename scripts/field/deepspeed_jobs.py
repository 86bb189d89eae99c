"""Jobs of DeepSpeed's pipelines in public repositories, judged by what their files ask for; nothing is built.

Each job's JSON goes through DeepSpeed's own configuration, and then through the backend's rules
(`backends/deepspeed/support.py`), on an engine without a model. That a script's own code would be refused (its data,
its losses, layers that change buffers) does not show here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from shell import ShellScript
from torch import nn

_LAUNCHED = "pretrain"
_WHOLE = ("deepspeed", "deepspeed_config")
_SIZES = ("train_batch_size", "gradient_accumulation_steps")
"""Left out: they go with a number of workers."""
_NEOX = ("optimizer", "zero_optimization", "fp16", "bf16", "amp", "gradient_clipping", "prescale_gradients",
         "gradient_predivide_factor", "communication_data_type", "curriculum_learning", "compression_training",
         "flops_profiler", "sparse_attention", "wall_clock_breakdown", "steps_per_print", "checkpoint")
"""What gpt-neox hands to DeepSpeed of its own file."""

_ITS_OWN = {"fp16": ("fp16", "type"), "bf16": ("type", "fp16", "bf16", "loss_scale", "loss_scale_window",
                                               "initial_scale_power", "hysteresis", "min_loss_scale")}
"""What DeepSpeed itself knows nothing of."""

Job = tuple[str, int, Callable[[], tuple[str, list[str]]]]
"""Name; stages, 0 if it has no pipeline; its judgement: what DeepSpeed says against it, and the plugin's refusals."""


def of_shell_scripts(checkout: Path, folders: tuple[str, ...]) -> Iterator[Job]:
    """Of scripts that start a Megatron under DeepSpeed."""
    for path in sorted(found for folder in folders for kind in ("sh", "slurm")
                       for found in (checkout / folder).rglob(f"*.{kind}")):
        script = ShellScript(path)
        if _LAUNCHED not in path.read_text(errors="replace") or not any(name in script.flags for name in _WHOLE):
            continue
        stages = 0 if "no_pipeline_parallel" in script.flags else (script.value("pipeline_model_parallel_size") or 1)
        yield str(path.relative_to(checkout)), stages, lambda script=script: _of_shell(script)  # type: ignore[misc]


def _of_shell(script: ShellScript) -> tuple[str, list[str]]:
    if not script.settings:
        return "its JSON is not in this repository", []
    refused: list[str] = []
    if "enable_zbh1_pipeline" in script.flags or "enable_zbh1_exact_semantics" in script.flags:
        refused.append("an engine of its own (zero bubble)")
    if "skip_train_iteration_range" in script.flags:
        refused.append("--skip-train-iteration-range")
    settings = script.settings[0]
    if "universal_checkpoint" in script.flags:
        settings = {**settings, "checkpoint": {"load_universal": True}}
    kind = "FusedLamb" if script.flags.get("optimizer") == "lamb" else "FusedAdam"
    kind = "Adam8bit" if "use_bnb_optimizer" in script.flags else kind
    stock, more = judge(settings, kind, script.value("num_experts") or 1)
    return stock, refused + more


def of_gpt_neox(checkout: Path) -> Iterator[Job]:
    """Of models in its folder of configurations."""
    for path in sorted((checkout / "configs").rglob("*.yml")):
        given: dict[str, Any] = {name.replace("-", "_"): value for name, value in yaml.full_load(
            path.read_text()).items()}
        if "num_layers" not in given:
            continue  # where data lies, and the like

        def found(given: dict[str, Any] = given) -> tuple[str, list[str]]:
            settings = {name: given[name] for name in _NEOX if name in given}
            for name, own in _ITS_OWN.items():
                if name in settings:
                    settings[name] = {key: value for key, value in settings[name].items() if key not in own}
            kind = str(settings.pop("optimizer", {}).get("type", "Adam"))
            kind = "Adam8bit" if given.get("use_bnb_optimizer") else kind
            return judge(settings, _NAMES.get(kind.lower(), kind), given.get("moe_num_experts", 1))

        yield str(path.relative_to(checkout)), int(given.get("pipe_parallel_size", 0)), found


_NAMES = {"adam": "FusedAdam", "cpu_adam": "DeepSpeedCPUAdam", "onebitadam": "OnebitAdam", "lion": "FusedLion"}


def judge(settings: Mapping[str, Any], optimizer: str, experts: int = 1) -> tuple[str, list[str]]:
    """What DeepSpeed itself, and then the plugin, says against a job with these ``settings`` of its JSON and an
    ``optimizer`` of this name, by the name of each option."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from megatron_recycle.backends.deepspeed.support import check_supported, given_up
    from megatron_recycle.errors import UnsupportedError
    from megatron_recycle.runtime.compute.sharded_optimizer import ELEMENTWISE

    plain = {name: value for name, value in settings.items() if name not in (*_SIZES, "optimizer", "scheduler")}
    plain["train_micro_batch_size_per_gpu"] = 1
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        dead = [_named(line) for line in given_up(plain)]
        for name in dead:
            plain.pop(name, None)
        try:
            config = DeepSpeedConfig(plain)
        except Exception as error:  # noqa: BLE001 - whatever its checks raise
            return f"{type(error).__name__}: {error}".splitlines()[0], dead
        engine = PipelineEngine.__new__(PipelineEngine)
        nn.Module.__init__(engine)
        made = type(optimizer, (torch.optim.SGD,), {})([nn.Parameter(torch.zeros(1))])
        module: Any = nn.Module()
        module.dynamic_shape = module.seed_layers = False
        axes = SimpleNamespace(get_axis_names=lambda: ("pipe", "data", "model"), get_dim=lambda axis: 2)
        vars(engine).update(_config=config, optimizer=made, has_moe_layers=experts > 1,
                            grid=SimpleNamespace(topology=lambda: axes))
        engine.module = module
        try:
            check_supported(engine)
            refused = []
        except UnsupportedError as error:
            refused = [_named(line[2:]) for line in str(error).splitlines() if line.startswith("- ")]
        if _stage(plain) == 1 and optimizer not in ELEMENTWISE:
            refused.append(f"optimizer {optimizer} with ZeRO-1")
    return "", dead + refused


def _stage(settings: Mapping[str, Any]) -> int:
    found = settings.get("zero_optimization", {})
    stage = found.get("stage", 0) if isinstance(found, Mapping) else 0
    return stage if isinstance(stage, int) else 0


def _named(line: str) -> str:
    return line.partition(":")[0].partition(",")[0]
