"""In a worker: holds it at the moments that `recycle chaos` asks for. Installed only if the launcher was told so."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megatron_recycle.environment import Launched
from megatron_recycle.observe import holds
from megatron_recycle.observe.holds import ARMED, MISSED, REACHED, Hold
from megatron_recycle.plan import Action

_KEPT = 2
"""Iterations that are still in flight beside the one a worker has begun."""


class ChaosObserver:
    """Holds the training thread at armed moments. `observe.holds` describes the files that it reads and writes.

    Args:
        folder: the files' folder, of this process alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[tuple[int, str], int] = {}
        self._newest = -1
        self._armed: dict[str, Hold] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def on(self, phase: str, iteration: int, action: Action | None) -> None:
        """Called by the training thread at the beginning of each phase."""
        nth = self._seen.get((iteration, phase), 0)
        self._seen[iteration, phase] = nth + 1
        if iteration > self._newest:
            self._newest = iteration
            self._seen = {key: times for key, times in self._seen.items() if key[0] >= iteration - _KEPT}
        self._look()
        for name, hold in list(self._armed.items()):
            if _matches(hold, phase, iteration, nth):
                del self._armed[name]
                self._reached(name, hold, phase, iteration, action)
            elif hold.iteration is not None and self._newest > hold.iteration + 1:
                del self._armed[name]
                holds.write(self._folder / (name + MISSED), {"iteration": iteration, "phase": phase})

    def _look(self) -> None:
        """Take in new orders, and drop those that were taken back."""
        names = {entry[: -len(ARMED)] for entry in os.listdir(self._folder) if entry.endswith(ARMED)}
        answered = {Path(entry).stem for entry in os.listdir(self._folder) if entry.endswith((REACHED, MISSED))}
        self._armed = {name: hold for name, hold in self._armed.items() if name in names}
        for name in sorted(names - answered - set(self._armed)):
            try:
                self._armed[name] = holds.read_hold(self._folder / (name + ARMED))
            except (OSError, ValueError, TypeError, KeyError):
                continue  # taken back meanwhile, or not from the tool

    def _reached(self, name: str, hold: Hold, phase: str, iteration: int, action: Action | None) -> None:
        order = self._folder / (name + ARMED)
        at = {"phase": phase, "iteration": iteration, "action": str(action) if action else None, "t": time.time()}
        holds.write(self._folder / (name + REACHED), at)
        holds.stand_still(order, hold)


def _matches(hold: Hold, phase: str, iteration: int, nth: int) -> bool:
    if hold.iteration not in (None, iteration):
        return False
    return hold.phase is None or (hold.phase, hold.nth) == (phase, nth)


def observer_for(launched: Launched) -> ChaosObserver | None:
    """This worker's observer if its launcher was told `--chaos`; None if not."""
    if not launched.chaos or launched.run_dir is None or launched.rank is None:
        return None
    return ChaosObserver(holds.folder_of(Path(launched.run_dir), launched.rank, os.getpid()))
