"""`recycle doctor -- SCRIPT ARGUMENTS`: would this job be refused? Nothing is trained.

DeepSpeed's JSON is judged by its keys. Then the script runs as rank 0, up to where it would meet the other ranks
(`tools.rehearsal`); by then Megatron-LM's options have been judged. Model-dependent checks happen at the job's start
alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_recycle.config import SECTION, RecycleConfig
from megatron_recycle.errors import ConfigError
from megatron_recycle.tools.rehearsal import INSISTS, REACHED

LIMIT = 300.0
"""Seconds that a script may take until it meets the others."""
_KEPT = 12
"""Last lines shown of a failed script."""


class Check(NamedTuple):
    """One finding: `state` is "ok", "warn" (works, but read it) or "fail" (a job would not work)."""

    name: str
    state: str
    text: str


def _on(section: Any) -> bool:
    return bool(section.get("enabled")) if isinstance(section, Mapping) else bool(section)


def _on_by_default(section: Any) -> bool:
    """Like `_on`, for sections that are on unless they say otherwise."""
    return bool(section) and (not isinstance(section, Mapping) or bool(section.get("enabled", True)))


REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("zero_optimization.stage", lambda stage: stage not in (0, 1), "set it to 1 or 0"),
    ("zero_optimization.offload_optimizer", bool, "leave it out"),
    ("zero_optimization.round_robin_gradients", bool, "leave it out"),
    ("zero_optimization.elastic_checkpoint", bool, "leave it out"),
    ("optimizer.type", lambda name: str(name).lower() in ("onebitadam", "onebitlamb", "zerooneadam", "muon"),
     'use one of torch.optim, for instance {"type": "Adam", "params": {"torch_adam": true}}'),
    ("torch_autocast", _on, "remove the section, use bf16 or fp32"),
    ("fp16.auto_cast", bool, "leave it out"),
    ("fp16.fp16_master_weights_and_grads", bool, "leave it out"),
    *((name, _on_by_default, "remove the section") for name in (
        "amp", "compression_training", "quantize_training", "eigenvalue", "progressive_layer_drop",
        "curriculum_learning")),
    ("data_efficiency", _on, "turn it off"),
    ("checkpoint.writer", bool, "leave it out: checkpoints are written at once"),
    ("checkpoint.use_node_local_storage", bool, "save to a folder that all hosts share"),
    ("datastates", bool, "leave it out: checkpoints are written at once"),
    ("flops_profiler", _on, "turn it off: DeepSpeed prints no profile under pipelines"),
)
"""Keys of DeepSpeed's JSON that are refused, for which values, and the remedy."""


def check_job(command: Sequence[str], size: int, limit: float = LIMIT) -> Iterator[Check]:
    """All checks of the job ``command`` (script and arguments, or -m and a module) of ``size`` processes that are
    possible before it starts."""
    module = command[0] in ("-m", "--module")
    script = Path(command[module])
    if not module and not script.exists():
        yield Check("script", "fail", f"there is no script {script}")
        return
    for path in _json_files(command[1:]):
        yield from check_json(path)
    if not module and (text := _text(script)) is not None and re.search(r"\bdeepspeed\.initialize\b", text) and (
            "PipelineModule" not in text):
        yield Check("pipeline", "warn", f"{script} calls deepspeed.initialize() and does not name PipelineModule: an "
                      "engine without pipeline stages is not protected (a model that another file builds is not seen)")
    yield _rehearse(command, size, limit)


def check_json(path: Path) -> Iterator[Check]:
    """Refused keys of DeepSpeed's JSON at ``path``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        yield Check("JSON", "fail", f"{path} is no JSON: {error}")
        return
    wrong = [*_refused(content), *_together(content)]
    try:
        if not RecycleConfig.resolve(content.get(SECTION)).enabled:
            yield Check("JSON", "warn", f"{path} or RECYCLE_ENABLED switches the plugin off: nothing is protected")
    except ConfigError as error:
        wrong.append(str(error))
    yield from (Check("JSON", "fail", f"{path}: {text}") for text in wrong)
    if not wrong:
        yield Check("JSON", "ok", f"{path}: no key of it is refused")


def _refused(content: Mapping[str, Any]) -> Iterator[str]:
    """Keys that are refused with the values that they have."""
    for key, wrong, remedy in REFUSED:
        value: Any = content
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and wrong(value):
            yield f"{key} is {json.dumps(value)}, which is refused: {remedy}"


def _together(content: Mapping[str, Any]) -> Iterator[str]:
    """Keys that are refused beside others."""
    prescales = content.get("prescale_gradients")
    if content.get("wall_clock_breakdown") and content.get("steps_per_print") is None:
        yield "wall_clock_breakdown without steps_per_print: set that as well"
    if prescales and (content.get("zero_optimization") or {}).get("stage") == 1:
        yield "prescale_gradients with ZeRO-1 is refused: leave it out"
    if not prescales and content.get("gradient_predivide_factor", 1.0) != 1.0:
        yield "gradient_predivide_factor is refused: leave it at 1, or set prescale_gradients"


def _json_files(arguments: Sequence[str]) -> Iterator[Path]:
    """DeepSpeed's JSON files among a script's arguments."""
    for word in arguments:
        path = Path(word.partition("=")[2] if word.startswith("--") else word)
        if path.suffix == ".json" and path.is_file():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                yield path
                continue
            if isinstance(content, Mapping) and {"train_batch_size", "train_micro_batch_size_per_gpu",
                                                 "gradient_accumulation_steps", "zero_optimization"} & content.keys():
                yield path


def _text(script: Path) -> str | None:
    try:
        return script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _rehearse(command: Sequence[str], size: int, limit: float) -> Check:
    try:
        status, lines = _run(command, size, limit)
        pretended = status != REACHED and any(INSISTS in line for line in lines)
        if pretended:
            status, lines = _run(["--pretend", *command], size, limit)
    except subprocess.TimeoutExpired:
        return Check("script", "warn", f"it did not get to its process group within {limit:.0f} s: not judged")
    otherwise = [line.partition("megatron-recycle: ")[2] for line in lines if " is off under recycle" in line]
    if status == REACHED:
        text = "nothing is refused up to where ranks meet; what depends on the model is judged at the start"
        notes = [text, *(["judged without a GPU, which a job needs"] if pretended else []), *otherwise]
        return Check("script", "warn" if otherwise else "ok", "; ".join(notes))
    if status == 0:
        return Check("script", "warn", "it ended without making a process group: nothing of it is protected")
    start = next((number for number, line in enumerate(lines) if "megatron-recycle" in line), max(0, len(lines) - 1))
    return Check("script", "fail", f"it ended with status {status}: "
                   + "\n".join(line.strip() for line in lines[start:start + _KEPT]))


def _run(command: Sequence[str], size: int, limit: float) -> tuple[int, list[str]]:
    """The rehearsal's status and its lines. Raises subprocess.TimeoutExpired."""
    environ = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run([sys.executable, "-m", "megatron_recycle.tools.rehearsal", *command], env=environ, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit, check=False)
    return done.returncode, [line for line in done.stdout.splitlines() if line.strip()]
