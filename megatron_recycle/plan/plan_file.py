"""Wire form of a plan file's content; `Plan` reads and writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import field

from .value import Value


class PlanFile(Value, frozen=True, omit_defaults=True, kw_only=True):
    """See docs/plan-file.md for the fields. Their types are checked here, their content by `Plan`."""

    format: str = ""
    version: int = 0
    grid: Mapping[str, Any] | None = None
    failed: Sequence[str] = ()
    costs: Mapping[str, Any] | None = None
    cap: Mapping[str, int] | None = None
    held: Mapping[str, Sequence[int]] | None = None
    block: int = 0
    tied: Sequence[Sequence[int]] = ()
    split_backward: bool = True
    full_backward: Sequence[int] = ()
    objective: str = "period"
    placement: Sequence[int] = ()
    lending: Mapping[str, Any] | None = None
    workers: Mapping[str, Sequence[str]] | None = None
    crossings: Mapping[str, Sequence[int]] = field(default_factory=dict)
    done: Mapping[str, int] = field(default_factory=dict)
    period: int | float | None = None
    makespan: int | float | None = None
    lower_bound: int | float | None = None
    source: str = ""
    digest: str = ""
    stats: Mapping[str, Any] = field(default_factory=dict)

    @property
    def about_lending(self) -> str:
        """Why layers are lent, or not; empty where lending was not considered."""
        return str(self.stats.get("lending") or "")
