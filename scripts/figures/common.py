"""What the figures' programs share: the paper's jobs, and where results go."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_recycle.plan import Costs
from megatron_recycle.tools.simulate.job import Job
from megatron_recycle.tools.simulate.model_costs import MODELS, Machine, Model, costs
from megatron_recycle.tools.simulate.policies.recycling import Stalls
from megatron_recycle.tools.simulate.report import Row, show

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"
CONSOLE = Console(width=None if sys.stdout.isatty() else 150)
STALLS = Stalls()
CLAIMS = {"ours over oobleck": "ReCycle paper: up to 1.46", "ours over bamboo": "ReCycle paper: up to 1.64",
          "moved-layers over recycle-published": "ElasWave paper: 1.35 (96 NPUs)",
          "moved-layers over torchft": "ElasWave paper: 1.60 (96 NPUs)"}
"""What others have published; ReCycle's figures are of its own system, as ElasWave's are."""
ASSUMPTIONS = (
    "throughput is relative to stock 1F1B on all GPUs without failures",
    "costs of stages follow the formula of megatron_recycle.tools.simulate.model_costs (A100: 140 TFLOPs reached, "
    "20 GB/s per GPU between hosts)",
    f"our stalls: {STALLS.exit} s after a process's end, {STALLS.host} s after a host's, {STALLS.rejoin} s for a worker"
    " that comes in, beside the copy of its state, as measured on CPU over gloo; NCCL will take longer",
    f"a process starts in {STALLS.start:.0f} s, a checkpoint takes {STALLS.save:.0f} s every hour (Young and Daly's"
    f" period for checkpoint-restart), a restart {STALLS.restart:.0f} s",
    "a worker may hold 2 S micro-batches; plans are the list scheduler's",
)


def job_of(model: Model | str, pipelines: int, stages: int, microbatches: int, tp: int = 1) -> Job:
    """A job with the model's costs."""
    known = MODELS[model] if isinstance(model, str) else model
    found, copy = costs(known, Machine(), pipelines, stages, tp)
    return Job(pipelines, stages, microbatches, found, layers=max(1, known.layers // stages), state_seconds=copy)


def even(pipelines: int, stages: int, microbatches: int, cap: int | None = None) -> Job:
    """A job of the scheduling study's costs: stages of 20, 22 and 18 units, hops of 1, steps of 15."""
    return Job(pipelines, stages, microbatches, Costs.uniform(stages, 20, 22, 18, 1, 15), 0.005, cap)


def ratios(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """What the papers claim, beside what these rows say."""
    value = {row.name: row.relative.mean for row in rows}
    found: dict[str, dict[str, Any]] = {}
    for pair, claim in CLAIMS.items():
        one, _, other = pair.partition(" over ")
        if value.get(one) and value.get(other):
            found[pair] = {"here": round(value[one] / value[other], 3), "published": claim}
    return found


def short(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows with the means of their outcomes instead of these."""
    told = []
    for row in rows:
        found = {name: value for name, value in row.to_json().items() if name != "outcomes"}
        found["spent"] = {cause: round(share, 6) for cause, share in found["spent"].items() if share}
        for name in ("lost", "failures", "survived", "fatal", "plans"):
            found[name] = round(row.mean(name), 3)
        told.append({name: round(value, 5) if isinstance(value, float) else value for name, value in found.items()})
    return told


def write(name: str, content: Mapping[str, Any]) -> None:
    """docs/figures/NAME.json."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    told = {"program": f"scripts/figures/{name}.py", "assumptions": [*ASSUMPTIONS], **content}
    text = json.dumps(told, indent=None if len(str(told)) > 20_000 else 1)
    (FOLDER / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
    CONSOLE.print(f"docs/figures/{name}.json and the picture are written")


def picture(name: str) -> Path:
    """docs/figures/NAME.svg."""
    return FOLDER / f"{name}.svg"


def tell(rows: Sequence[Row], title: str) -> None:
    show(rows, CONSOLE, title)


def trace_file(name: str) -> Path:
    """A public trace, in the folder that RECYCLE_TRACES names. Exits if it is not there."""
    path = Path(os.environ.get("RECYCLE_TRACES", "")) / name
    if not os.environ.get("RECYCLE_TRACES") or not path.exists():
        raise SystemExit(f"{name} is not there: set RECYCLE_TRACES to a folder that has it")
    return path
