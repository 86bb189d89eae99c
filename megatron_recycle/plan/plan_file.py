"""Wire form of a plan file's content; `Plan` reads and writes it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from .grid import Grid
from .value import Count, Value

Figure = Count | Annotated[float, Meta(ge=0, le=sys.float_info.max)]


class Held(Value, frozen=True):
    """Memory units of a micro-batch, by chunk."""

    before_b: tuple[Count, ...] = ()
    after_b: tuple[Count, ...] = ()
    message: tuple[Count, ...] = ()


class Lending(Value, frozen=True):
    """Layers that may be lent; see `Problem`."""

    layers: tuple[Count, ...] = ()
    lend: tuple[tuple[Count, Count], ...] = ()
    held: tuple[tuple[Count, Count], ...] = ()
    parameters: tuple[Count, ...] = ()


class PlanFile(Value, frozen=True, omit_defaults=True, kw_only=True):
    """See docs/plan-file.md for the fields. Their types are checked here, their content by `Plan`.

    ``stage_of``: of version 1.
    """

    format: str = ""
    version: int = 0
    grid: Grid | None = None
    failed: Sequence[str] = ()
    costs: Mapping[str, Any] | None = None
    cap: Mapping[str, int] = field(default_factory=dict)
    held: Held = Held()
    block: Count = 0
    tied: tuple[tuple[Count, ...], ...] = ()
    split_backward: bool = True
    full_backward: tuple[Count, ...] = ()
    objective: Literal["period", "makespan"] = "period"
    placement: tuple[Count, ...] = ()
    lending: Lending = Lending()
    stage_of: Mapping[str, Any] = field(default_factory=dict)
    workers: Mapping[str, tuple[str, ...]] | None = None
    crossings: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    done: Mapping[str, int] = field(default_factory=dict)
    period: Figure | None = None
    makespan: Figure | None = None
    lower_bound: Figure | None = None
    source: str = ""
    digest: str = ""
    stats: Mapping[str, Any] = field(default_factory=dict)

    @property
    def about_lending(self) -> str:
        """Why layers are lent, or not; empty where lending was not considered."""
        return str(self.stats.get("lending") or "")
