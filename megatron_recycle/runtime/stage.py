"""The framework's side, as the runtime needs it: one stage's computation and one optimizer step."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from megatron_recycle.membership import Verdict
from megatron_recycle.runtime.compute.data import Batch
from megatron_recycle.runtime.compute.sharded_optimizer import ShardedOptimizer
from megatron_recycle.runtime.lent.layers import Lending

Averaging = Literal["after", "before", "tokens"]
"""Where a reduced gradient is divided by the nominal number of pipelines: after the sum over workers, before it, or not
at all, since it is divided by the number of tokens in the global batch (`per_token`)."""


@dataclass(frozen=True)
class Forward:
    """Result of one micro-batch's forward.

    ``saved`` is for the stage's backward; ``roots`` are the tensors that it begins at, before anything that
    was computed from parameters; ``outputs`` go to the next stage (empty at the last);
    ``loss`` is the micro-batch's unscaled loss, a scalar, at the last stage only; ``report`` are further numbers
    of the micro-batch, as many as the stage's ``report_width``, at the last stage only. The first of them is
    summed over the global batch into ``Verdict.weight``.
    """

    saved: Any
    outputs: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None
    report: tuple[float, ...] = ()
    roots: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class Tie:
    """One parameter with copies on several stages; its gradient is the sum of theirs.

    ``parameter`` is this stage's copy, ``stages`` are all stages with one, ascending. ``first``: the framework adds up
    the stages' gradients before the pipelines'. ``number`` is the same on all of these stages, and another for each of
    the model's ties; a stage has its own in ascending order.
    """

    parameter: nn.Parameter
    stages: tuple[int, ...]
    first: bool = False
    number: int = 0


def fingerprint(parameters: Sequence[nn.Parameter]) -> str:
    """Number, size and type of ``parameters``, and a checksum of their shapes in order."""
    shapes = ";".join(f"{tuple(parameter.shape)} {parameter.dtype}" for parameter in parameters)
    numbers = sum(parameter.numel() for parameter in parameters)
    return f"{len(parameters)} parameters of {numbers} numbers, shapes {zlib.crc32(shapes.encode()):08x}"


@dataclass(frozen=True)
class Chunk:
    """A part of the model that a stage holds: its ``module``, and the layers that it may lend to neighbours and borrow
    from them (``lending``; None: neither)."""

    module: nn.Module
    lending: Lending | None = None


class Stage(Protocol):
    """One stage of the model with its optimizer, at home on this worker; implemented by the backends."""

    device: torch.device
    module: nn.Module
    """The stage's part of the model."""
    averaging: Averaging
    gradient_dtype: torch.dtype | None
    """The type that gradients are summed in; None: the parameters' own."""
    report_width: int
    """Numbers in a ``Forward.report``; equal on all workers."""
    tied_stages: tuple[tuple[int, ...], ...]
    """Sets of stages that share a parameter, the same on all workers."""
    model: str
    """The facts that peers must have alike, in words: parameters (see `fingerprint`) and optimizer."""
    settings: Mapping[str, Any]
    """The settings of the framework's loop that all workers must have alike, by their users' names, for JSON."""
    shards: ShardedOptimizer | None
    """The optimizer, if its state is cut into shards: `step` then steps this worker's shards, with gradients
    for these alone, and `state` has the parameters only."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Parameters that get gradients, in the same order on all peers; they change only when `look` says so. Chunks
        follow one another; a parameter of several chunks (tied embeddings) is among those of the first."""

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The stage's chunks, in the order of the model's layers. Most stages have one."""

    def running_chunk(self, chunk: int) -> AbstractContextManager[None]:
        """A block whose forwards and backwards are those of this chunk, counted within the stage."""

    def look(self) -> bool:
        """An iteration begins: pick up the script's edits since the last one. If they affect gradients, that iteration
        has been committed. Returns whether `parameters` have changed.

        Raises UnsupportedError for an edit that cannot be followed, on all peers alike unless their scripts differ."""

    def forward(self, inputs: tuple[torch.Tensor, ...] | None, batch: Batch | None) -> Forward:
        """Forward of one micro-batch. ``inputs`` are the previous stage's outputs as leaves that require
        gradients (None at the first stage), ``batch`` the micro-batch's data (None between first and last)."""

    def backward(self, forward: Forward, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Backward of one micro-batch. ``gradients`` belong to the floating-point outputs (empty at the last
        stage, which starts from its loss). Adds parameter gradients to ``.grad`` (or the splitter's queue), and
        returns those of the floating-point inputs."""

    @property
    def ties(self) -> Sequence[Tie]:
        """This stage's copies of parameters that other stages have too, in the same order on all of them."""

    def norm_square(self, gradients: Sequence[torch.Tensor]) -> float:
        """This stage's share of the squared global gradient norm; 0 if the framework does not count it. With several
        parts each gives its own share. With shards it is the share of one shard: each gradient then has only its
        elements in that shard, flat, often none."""

    def zeros(self, gradients: Sequence[torch.Tensor]) -> float:
        """Number of zeros in this stage's gradient (in this part's share); 0 if they are not counted."""

    def coefficient(self, norm_squares: Sequence[float], weight: float) -> float:
        """The coefficient of all gradients in the step, from each stage's `norm_square` (each part's, stage by stage,
        where workers have several; each shard's in turn, with shards) and the global batch's ``Verdict.weight``; 1
        changes nothing.

        A function of these and of the settings that `look` has found last, called from any thread: the script's later
        edits count for the next iteration. A stage that does not know the others' norms yet passes zeros for them."""

    def step(self, gradients: Sequence[torch.Tensor], coefficient: float) -> None:
        """One optimizer update with the reduced ``gradients``, one per parameter (with shards one, flat, for each that
        this worker holds), times ``coefficient``; may change them in place if the coefficient is not 1."""

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that `step` changes, by name: parameters and optimizer state."""

    def fixed(self) -> dict[str, torch.Tensor]:
        """The tensors that training does not change but results depend on, by name: frozen parameters, buffers."""

    def load_state(self, tensors: Mapping[str, torch.Tensor], counters: Any) -> None:
        """Become a copy of a peer whose `state` and `fixed` are ``tensors`` and whose `counters` are those; the
        tensors may be kept."""

    def reset_state(self, names: Collection[str]) -> None:
        """Make `state` have exactly these names, by dropping optimizer state that is not among them."""

    def counters(self) -> Any:
        """A copy of everything else that `step` changes: step counts, learning-rate schedule. Made of dicts, lists,
        tuples, numbers and tensors."""

    def set_counters(self, counters: Any) -> None:
        """Put back a copy made by `counters`."""

    @property
    def references(self) -> dict[str, Any]:
        """Further objects that a step uses and a script may replace, by name. They are compared by identity and as
        numbers, a list item by item."""

    def refer(self, references: Mapping[str, Any]) -> None:
        """Put back the objects that `references` gave."""

    @property
    def may_guess_wrong(self) -> bool:
        """Whether a stage that steps before it knows the others' norms may be wrong."""

    def summary(self, verdict: Verdict, reports: torch.Tensor) -> bytes:
        """The results that a script can ask for of the committed iteration of ``verdict``, with the `Forward.report`s
        ``reports``: for a worker that comes in later."""

    def recall(self, summary: bytes) -> None:
        """The script's loop passes over an iteration: show it this `summary`."""

    def regroup(self, groups: Any) -> None:
        """Point every handle that the framework keeps at the new generation's groups."""
