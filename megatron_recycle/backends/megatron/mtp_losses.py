"""Losses of multi-token prediction, which core adds up in a table of its own for the log.

Core adds the losses of each forward on the last stage to that table, and averages over pipelines when it writes a line.
Here a micro-batch runs anywhere, some run twice, and pipelines may be gone. So each loss is reported with its
micro-batch. At the end of an iteration the table gets the values of a run without failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

_MEANS, _SUMS = ("values", "loss_values"), ("correct_values", "total_values")
"""Core's tables: it logs the mean over pipelines (the second name is for 0.19), or the sum."""
_TABLES = (*_MEANS, *_SUMS)


class Predictions:
    """The MTP losses of one worker.

    Args:
        config: of the model.

    Attributes:
        most: upper limit of the reported numbers of a micro-batch.
    """

    def __init__(self, config: Any) -> None:
        self.most = int(getattr(config, "mtp_num_layers", None) or 0) * (1 + len(_SUMS))
        self._tracker: dict[str, Any] = MTPLossLoggingHelper.tracker

    def begin(self) -> None:
        """Clear the tables before a micro-batch goes through the model."""
        for table in _TABLES:
            self._tracker.pop(table, None)

    def take(self) -> dict[Any, float]:
        """The micro-batch's numbers, as values to report: empty except on the last stage, in training."""
        return {(table, layer): number for table in _TABLES if table in self._tracker
                for layer, number in enumerate(self._tracker.pop(table).tolist())}

    def show(self, reports: Sequence[dict[Any, torch.Tensor]], microbatches: int, training: bool) -> None:
        """Remove the numbers from ``reports`` of all micro-batches of an iteration. In ``training`` put them where core
        reads them for its line; it divides means by the ``microbatches`` of a pipeline."""
        names = [name for name in reports[0] if isinstance(name, tuple)]
        taken = {name: torch.cat([report.pop(name) for report in reports]) for name in names}
        if not (training and taken):
            return
        tables: dict[str, list[torch.Tensor]] = {}
        for (table, _), numbers in taken.items():
            tables.setdefault(table, []).append(numbers.mean() * microbatches if table in _MEANS else numbers.sum())
        self._tracker.update({table: torch.stack(rows) for table, rows in tables.items()})
        self._tracker.update(reduce_group=None, avg_group=None)
