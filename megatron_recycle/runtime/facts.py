"""Facts about training that a joiner gets beside the tensors of its stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_recycle.membership import StepMode, Verdict
from megatron_recycle.plan.value import Value
from megatron_recycle.runtime.evaluation import Evaluated
from megatron_recycle.runtime.iteration_history import Rows


class Past(Value, frozen=True):
    """Results of iterations (``history``) and evaluations so far, and the iterations of ``saved`` checkpoints."""

    history: Rows
    evaluated: Evaluated
    saved: Sequence[int]


class Facts(Past, frozen=True):
    """Where a stage stands between two iterations: its ``counters``, the last ``verdict`` and the mode (``pace``), the
    ``reports`` of the last iteration, the grids so far, and a checksum of some data ``read`` for it."""

    counters: Any
    verdict: Verdict
    reports: torch.Tensor
    pace: StepMode
    grids: Sequence[Sequence[int]]
    read: dict[tuple[int, int, bool], int]


class Saved(Value, frozen=True):
    """The facts of a checkpoint, and its name."""

    verdict: Verdict
    pace: StepMode
    grids: Sequence[Sequence[int]]
    name: str
