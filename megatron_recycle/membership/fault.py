"""A script's exception as a value that travels: to the coordinator, into events and messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_recycle.errors import GenerationOver, JobEnded, LendingError, RecycleError
from megatron_recycle.observe.text import one_line

_LONGEST = {"error": 120, "text": 1500, "action": 40}
"""Characters of each field."""
_LONGEST_OF_SCRIPTS = 300
"""Characters of a text that is not ours; the rest is in the worker's log."""
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""Parts of a text that differ between two workers with the same error: addresses, ranks, devices, sizes."""


@dataclass(frozen=True)
class Fault:
    """An exception that nothing on its worker has handled.

    Build it with `of` or `parse`: they bound its length and take out control characters.
    """

    error: str
    """The type's name, e.g. ``KeyError`` or ``torch.OutOfMemoryError``."""
    text: str
    """Its text, on one line."""
    iteration: int | None = None
    """The iteration of the action; without an action the last one that the worker has behind it. None: before any."""
    action: str | None = None
    """The action under way, as plans write it, e.g. ``F1.3``; ``S`` is the reduction and the step. None: outside."""
    refused: bool = False
    """Whether it is a refusal of this package: any worker in this one's place would meet it too."""
    whole: bool = False
    """Whether the worker waits in it for what the coordinator decides, with all of its state."""
    recovery: bool = False
    """Whether it came up because others have failed: in a recovery, or for want of memory in a guest's micro-batch."""
    unlent: int | None = None
    """The stage whose layers cannot be lent, where that is all there is to it."""

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
        most = _LONGEST["text"] if refused else _LONGEST_OF_SCRIPTS
        return cls(one_line(name, _LONGEST["error"]), one_line(text, most), iteration, action, refused, whole, recovery,
                   error.stage if isinstance(error, LendingError) else None)

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Fault:
        """As another process has sent it. Raises KeyError, TypeError or ValueError for anything else."""
        fault = cls(**{name: data[name] for name in cls.__dataclass_fields__})
        kinds: dict[str, Any] = {"error": str, "text": str, "iteration": (int, type(None)), "action": (str, type(None)),
                 "refused": bool, "whole": bool, "recovery": bool, "unlent": (int, type(None))}
        for name, kind in kinds.items():
            value = getattr(fault, name)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise TypeError(f"{name} is {value!r:.60}")
            if isinstance(value, str) and value != one_line(value, _LONGEST[name]):
                raise ValueError(f"{name} is not one short line: {value!r:.60}")
        return fault

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def __str__(self) -> str:
        """Type and text, as a traceback ends."""
        return f"{self.error}: {self.text}" if self.text else self.error

    @property
    def where(self) -> str:
        """When it happened, to be put behind the text."""
        if self.iteration is None:
            return "before its first iteration"
        return f"in {self.action} of iteration {self.iteration}" if self.action else f"after iteration {self.iteration}"

    @property
    def microbatch(self) -> str | None:
        """The micro-batch, e.g. ``1.3``, if it came up in the work on one."""
        return self.action.lstrip("FBW") if self.action and "." in self.action else None

    @property
    def work(self) -> str | None:
        """The action, as any worker has it: one runs a backward in full (``FB1.3``) that another splits (``B1.3``)."""
        return self.action.replace("FB", "B") if self.action else None

    def behind(self, iteration: int) -> bool:
        """Whether it came up after ``iteration``, in no action."""
        return self.action is None and not self.recovery and self.iteration is not None and self.iteration >= iteration

    def same(self, other: Fault) -> bool:
        """Whether another worker's is the same one: type, text but for numbers, and what was being done. Outside of
        actions no two workers are at the same place; there one iteration more or less makes no difference."""
        alike = self.error == other.error and _VARYING.sub("#", self.text) == _VARYING.sub("#", other.text)
        if not alike or self.work != other.work:
            return False
        if self.action is None:
            return abs((self.iteration or 0) - (other.iteration or 0)) <= 1
        return self.iteration == other.iteration
