"""Losses of multi-token prediction, which core adds up in a place of its own for the log.

Core adds those of each forward on the last stage to a table, and takes the mean over pipelines when a line is written.
Here a micro-batch runs anywhere, some run twice, and pipelines may be gone: so each is reported with its micro-batch,
and once an iteration is through the table gets what it would have without failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

_MEANS, _SUMS = ("values", "loss_values"), ("correct_values", "total_values")
"""Core's tables: the mean over pipelines is logged (the second name is that of 0.19), or the sum."""
_TABLES = (*_MEANS, *_SUMS)


class Predictions:
    """Those of one worker.

    Args:
        config: of the model.

    Attributes:
        most: numbers of a micro-batch that are reported at most.
    """

    def __init__(self, config: Any) -> None:
        self.most = int(getattr(config, "mtp_num_layers", None) or 0) * (1 + len(_SUMS))
        self._tracker: dict[str, Any] = MTPLossLoggingHelper.tracker

    def begin(self) -> None:
        """A micro-batch is about to go through the model."""
        for table in _TABLES:
            self._tracker.pop(table, None)

    def take(self) -> dict[Any, float]:
        """What it has added, as values to report: nothing but on the last stage, in training."""
        return {(table, layer): number for table in _TABLES if table in self._tracker
                for layer, number in enumerate(self._tracker.pop(table).tolist())}

    def show(self, reports: Sequence[dict[Any, torch.Tensor]], microbatches: int, training: bool) -> None:
        """Take the numbers out of ``reports`` of all micro-batches of an iteration. In ``training`` put them where core
        looks for them when it writes its line, which divides means by the ``microbatches`` of a pipeline."""
        names = [name for name in reports[0] if isinstance(name, tuple)]
        taken = {name: torch.cat([report.pop(name) for report in reports]) for name in names}
        if not (training and taken):
            return
        tables: dict[str, list[torch.Tensor]] = {}
        for (table, _), numbers in taken.items():
            tables.setdefault(table, []).append(numbers.mean() * microbatches if table in _MEANS else numbers.sum())
        self._tracker.update({table: torch.stack(rows) for table, rows in tables.items()})
        self._tracker.update(reduce_group=None, avg_group=None)
