"""A script's exception as a value for the wire: for the coordinator, events and messages."""

from __future__ import annotations

import re

from megatron_recycle.errors import GenerationOver, JobEnded, LendingError, RecycleError
from megatron_recycle.observe.text import one_line
from megatron_recycle.plan.value import Value

_LONGEST_NAME, _LONGEST, _LONGEST_ACTION = 120, 1500, 40
"""Character limits of the fields."""
_LONGEST_OF_SCRIPTS = 300
"""Character limit of a text from outside this package; the rest is in the worker's log."""
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""Parts of a text that differ between two workers with the same error: addresses, ranks, devices, sizes."""


class Fault(Value, frozen=True):
    """An exception left unhandled on its worker.

    `of` limits its length and removes control characters; `check` verifies that another process has done so.
    """

    error: str
    """The type's name, e.g. ``KeyError`` or ``torch.OutOfMemoryError``."""
    text: str
    """Its text, on one line."""
    iteration: int | None = None
    """The iteration of the action; outside actions the last one that the worker has finished. None: before any."""
    action: str | None = None
    """The action under way, as plans write it, e.g. ``F1.3``; ``S`` is the reduction and the step. None: outside."""
    refused: bool = False
    """Whether it is a refusal by this package: any worker in its place would meet it too."""
    whole: bool = False
    """Whether the worker waits in it for the coordinator's decision, with all of its state."""
    recovery: bool = False
    """Whether other failures caused it: raised in a recovery, or for lack of memory in a guest's micro-batch."""
    unlent: int | None = None
    """The stage whose layers cannot be lent, if that alone is the error."""

    @classmethod
    def of(cls, error: BaseException, iteration: int | None = None, action: str | None = None,
           whole: bool = False, recovery: bool = False) -> Fault:
        """The value for ``error``."""
        kind = type(error)
        own = kind.__module__ in ("builtins", "__main__") or kind.__module__.startswith("megatron_recycle.")
        name = kind.__qualname__ if own else f"{kind.__module__}.{kind.__qualname__}"
        refused = isinstance(error, RecycleError) and not isinstance(error, (GenerationOver, JobEnded))
        try:
            text = str(error)
        except Exception as worse:  # noqa: BLE001 - the script's own type may fail here too
            text = f"(its text cannot be had: {type(worse).__name__})"
        most = _LONGEST if refused else _LONGEST_OF_SCRIPTS
        return cls(one_line(name, _LONGEST_NAME), one_line(text, most), iteration, action, refused, whole, recovery,
                   error.stage if isinstance(error, LendingError) else None)

    def check(self) -> None:
        """Raise ValueError if a text is not one short line."""
        for text, most in ((self.error, _LONGEST_NAME), (self.text, _LONGEST), (self.action or "", _LONGEST_ACTION)):
            if text != one_line(text, most):
                raise ValueError(f"not one short line: {text!r:.60}")

    def __str__(self) -> str:
        """Type and text, as at the end of a traceback."""
        return f"{self.error}: {self.text}" if self.text else self.error

    @property
    def where(self) -> str:
        """When it happened, to be appended to the text."""
        if self.iteration is None:
            return "before its first iteration"
        return f"in {self.action} of iteration {self.iteration}" if self.action else f"after iteration {self.iteration}"

    @property
    def microbatch(self) -> str | None:
        """The micro-batch, e.g. ``1.3``, of the action that raised it."""
        return self.action.lstrip("FBW") if self.action and "." in self.action else None

    @property
    def work(self) -> str | None:
        """The action, normalised: one worker runs a full backward (``FB1.3``) that another splits (``B1.3``)."""
        return self.action.replace("FB", "B") if self.action else None

    def behind(self, iteration: int) -> bool:
        """Whether it was raised after ``iteration``, in no action."""
        return self.action is None and not self.recovery and self.iteration is not None and self.iteration >= iteration

    def same(self, other: Fault) -> bool:
        """Whether another worker's fault is the same: type, text but for numbers, and action. Outside of actions no two
        workers are at the same place; there one iteration more or less makes no difference."""
        alike = self.error == other.error and _VARYING.sub("#", self.text) == _VARYING.sub("#", other.text)
        if not alike or self.work != other.work:
            return False
        if self.action is None:
            return abs((self.iteration or 0) - (other.iteration or 0)) <= 1
        return self.iteration == other.iteration
