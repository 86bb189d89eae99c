"""Outcomes of policies over one trace or several, beside each other: numbers, JSON, and a table for people."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table

from megatron_recycle.tools.simulate.policies.base import Cause
from megatron_recycle.tools.simulate.run import Outcome

_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10,
        2.09, 2.09)
"""Student's t for 95 % by degrees of freedom from 1; 1.96 beyond."""
CAUSES = (Cause.CHECKPOINT, Cause.RECOVERY, Cause.REJOIN, Cause.RECONFIGURE, Cause.RESTART, Cause.REDONE,
          Cause.ROLLED_BACK, Cause.STOPPED)
"""Causes of time that is not useful, in the order of tables."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and half the width of its 95 % confidence interval (Student's; 0 for one seed)."""

    mean: float
    half: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        mean = statistics.fmean(values)
        if len(values) < 2:
            return cls(mean)
        t = _T95[len(values) - 2] if len(values) - 2 < len(_T95) else 1.96
        return cls(mean, t * statistics.stdev(values) / math.sqrt(len(values)))

    def shown(self, digits: int = 3) -> str:
        return f"{self.mean:.{digits}f}" + (f" ±{self.half:.{digits}f}" if self.half else "")


@dataclass(frozen=True)
class Row:
    """A policy's outcomes, one for each trace. ``free`` and ``scaled``: throughputs of the two marks in each."""

    name: str
    outcomes: Sequence[Outcome]
    free: Sequence[float]
    scaled: Sequence[float]

    @property
    def relative(self) -> Estimate:
        """Throughput relative to stock 1F1B without failures."""
        return Estimate.of([one.throughput / free for one, free in zip(self.outcomes, self.free)])

    @property
    def of_scaled(self) -> Estimate:
        """Throughput relative to stock 1F1B slowed down in proportion to the losses."""
        return Estimate.of([one.throughput / scaled if scaled else 0.0
                            for one, scaled in zip(self.outcomes, self.scaled)])

    def share(self, cause: str) -> float:
        """Share of the time, over all traces."""
        return sum(one.spent.get(cause, 0.0) for one in self.outcomes) / sum(one.duration for one in self.outcomes)

    def mean(self, name: str) -> float:
        """The mean of an attribute of the outcomes."""
        return statistics.fmean(getattr(one, name) for one in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        relative, scaled = self.relative, self.of_scaled
        return {"policy": self.name, "of_fault_free": relative.mean, "of_fault_free_ci95": relative.half,
                "of_fault_scaled": scaled.mean, "of_fault_scaled_ci95": scaled.half,
                "useful": self.mean("useful"), "spent": {cause: self.share(cause) for cause in CAUSES},
                "outcomes": [one.to_json() for one in self.outcomes]}


def show(rows: Sequence[Row], console: Console, title: str) -> None:
    """The table; its lines are for terminals."""
    table = Table(title=title, box=HEAVY_HEAD if console.is_terminal else None)
    for heading in ("policy", "of fault-free", "of fault-scaled", "useful"):
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    table.add_column("the rest of the time")
    for heading in ("iterations lost", "losses survived", "fatal", "plans", "CPU"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row.name, row.relative.shown(), row.of_scaled.shown(), f"{100 * row.mean('useful'):.1f} %",
                      ", ".join(f"{cause} {100 * row.share(cause):.2g} %" for cause in CAUSES if row.share(cause)),
                      f"{row.mean('lost'):.1f}", f"{row.mean('survived'):.4g} of {row.mean('failures'):.4g}",
                      f"{row.mean('fatal'):.3g}", f"{row.mean('plans'):.3g}", f"{row.mean('cpu'):.1f} s")
    console.print(table)
