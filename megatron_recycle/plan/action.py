"""One unit of a worker's work: forward, input-gradient and weight-gradient backward, both in one, reduce-and-step."""

from __future__ import annotations

import re
from typing import NamedTuple

from .errors import PlanError

KINDS = ("F", "B", "W", "FB", "S")
PASSES_ON = {"F": "F", "B": "B", "FB": "B"}
"""Kind of the message that an action ends with: an activation (F) to the next stage, a gradient (B) to the last one."""
_ACTION = re.compile(r"(FB|[FBW])([0-9]{1,9})\.([0-9]{1,9})(?:/([1-9][0-9]{0,3}))?\Z")


class Action(NamedTuple):
    """``kind`` of KINDS on a pipeline's micro-batch; ``S`` has neither. Printed and parsed as ``"F1.4"`` or ``"S"``.

    ``chunk`` counts the chunks of the worker's stage in the order of the model's layers (Megatron's model_chunk_id):
    0 is the first, and the only one where a stage has no second. Printed ``"F1.4/1"`` where it is not 0.

    ``FB`` is the full backward of a micro-batch: its B and W in one, as the stock framework runs it.
    """

    kind: str
    pipeline: int = -1
    microbatch: int = -1
    chunk: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "S" else named(*self)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read ``"F1.4"`` or ``"S"``. Raises PlanError for anything else."""
        if text == "S":
            return STEP
        match = _ACTION.match(text) if isinstance(text, str) else None
        if match is None:
            raise PlanError(f"action {text!r} is not of the form F1.4, B1.4, W1.4, FB1.4 or S (F1.4/1 for the"
                            " second chunk of a stage)")
        return cls(match[1], int(match[2]), int(match[3]), int(match[4] or 0))


def named(kind: str, pipeline: int, microbatch: int, chunk: int) -> str:
    """``"F1.4"``, or ``"F1.4/1"`` for a chunk that is not the first of its stage."""
    return f"{kind}{pipeline}.{microbatch}/{chunk}" if chunk else f"{kind}{pipeline}.{microbatch}"


def of_place(what: str, chunk: int) -> str:
    """Name of an action kind (or other per-chunk item) of a stage's chunk: ``"F"``, or ``"F/1"`` for a chunk that is
    not the first."""
    return f"{what}/{chunk}" if chunk else what


STEP = Action("S")
