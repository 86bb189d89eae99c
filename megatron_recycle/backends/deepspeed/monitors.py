"""DeepSpeed's monitors (TensorBoard, CSV, Weights & Biases, Comet), which go on when the rank that writes them dies.

Stock writes on rank 0, while it trains. Here the first live worker writes an iteration's numbers once, when the
iteration is over for its script. A new writer opens the same files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepspeed.monitor import comet, csv_monitor, monitor, tensorboard, wandb

from megatron_recycle.backends.patching import replaced

Event = tuple[str, float, int]
"""Name, value, samples so far."""

_MODULES: Sequence[Any] = (monitor, tensorboard, csv_monitor, wandb, comet)
"""They use the process group for this worker's rank only."""


def name_run(config: Mapping[str, Any]) -> None:
    """Before DeepSpeed opens a run of Weights & Biases on rank 0, name it, so that the next writer goes on in the same
    run. Have it write every second instead of every 15, since unwritten data dies with its process. ``config``:
    DeepSpeed's."""
    section, folder = config.get("wandb"), os.environ.get("RECYCLE_RUN_DIR")
    if isinstance(section, Mapping) and section.get("enabled") and folder:
        os.environ.setdefault("WANDB_RUN_ID", Path(folder).name)
        os.environ.setdefault("WANDB_RESUME", "allow")
        os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "1")


class Monitors:
    """Replacement of the engine's `MonitorMaster`.

    Args:
        stock: the engine's, which writes on rank 0 only.
        writes: whether this worker is the current writer.
        busy: whether the caller is DeepSpeed, not the script: then nothing is written, since the iteration may be run
            again.
    """

    def __init__(self, stock: monitor.MonitorMaster, writes: Callable[[], bool], busy: Callable[[], bool]) -> None:
        self._stock = stock
        self._writes = writes
        self._busy = busy
        self._own: monitor.MonitorMaster | None = None
        self.enabled: bool = stock.enabled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def write_events(self, events: Sequence[Event]) -> None:
        """As stock's, for the script's own numbers."""
        if not self._busy():
            self.write(events)

    def write(self, events: Sequence[Event]) -> None:
        """Write ``events`` if this worker is the writer."""
        if not self.enabled or not self._writes():
            return
        with ExitStack() as as_rank_zero:
            for module in _MODULES:
                as_rank_zero.enter_context(replaced(module, dist=SimpleNamespace(get_rank=lambda *_: 0)))
            if self._own is None:
                self._own = self._opened()
            self._own.write_events(events)

    def _opened(self) -> monitor.MonitorMaster:
        stock, config = self._stock, self._stock.monitor_config
        parts = (stock.tb_monitor, stock.wandb_monitor, stock.csv_monitor, stock.comet_monitor)
        own = stock if any(part is not None for part in parts) else monitor.MonitorMaster(config)
        if own.csv_monitor is not None:  # existing files have their header line
            files = Path(own.csv_monitor.log_dir).glob("*.csv")
            own.csv_monitor.filenames += [file.stem for file in files]
        return own
