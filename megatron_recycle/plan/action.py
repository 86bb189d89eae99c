"""One unit of a worker's work: forward, input-gradient and weight-gradient backward, both in one, reduce-and-step."""

from __future__ import annotations

import re
from typing import NamedTuple

from .errors import PlanError

KINDS = ("F", "B", "W", "FB", "S")
PASSES_ON = {"F": "F", "B": "B", "FB": "B"}
"""Kind of the message that an action ends with: an activation (F) to the next stage, a gradient (B) to the last one."""
_ACTION = re.compile(r"(FB|[FBW])([0-9]{1,9})\.([0-9]{1,9})\Z")


class Action(NamedTuple):
    """``kind`` of KINDS on a pipeline's micro-batch; ``S`` has neither. Printed and parsed as ``"F1.4"`` or ``"S"``.

    ``FB`` is the full backward of a micro-batch: its B and W in one, as the stock framework runs it.
    """

    kind: str
    pipeline: int = -1
    microbatch: int = -1

    def __str__(self) -> str:
        return self.kind if self.kind == "S" else f"{self.kind}{self.pipeline}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read ``"F1.4"`` or ``"S"``. Raises PlanError for anything else."""
        if text == "S":
            return STEP
        match = _ACTION.match(text) if isinstance(text, str) else None
        if match is None:
            raise PlanError(f"action {text!r} is not of the form F1.4, B1.4, W1.4, FB1.4 or S")
        return cls(match[1], int(match[2]), int(match[3]))


STEP = Action("S")
