"""Holds of a worker at moments that `recycle chaos` asks for, agreed through files in the run directory.

The observer makes a folder `chaos/RANK-PID/` when it begins. The tool puts `NAME.json`, a `Hold`, there. The observer
answers by `NAME.reached` and stands still, or by `NAME.missed`. It goes on once `NAME.json` is gone, once `seconds`
have passed, or once the tool has ended: a tool that dies does not hang the job.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from megatron_recycle.environment import Launched
from megatron_recycle.observe.disk import write_whole
from megatron_recycle.plan import Action
from megatron_recycle.plan.value import Value

FOLDER = "chaos"
ARMED, REACHED, MISSED = ".json", ".reached", ".missed"
_PAUSE = 0.005
_KEPT = 2
"""Iterations that are still in flight beside the one a worker has begun."""


class Hold(Value, frozen=True, forbid_unknown_fields=True):
    """Stand still at the `nth` (from 0) `phase` of `iteration`; None is any.

    `owner` is the tool's (pid, start in clock ticks): with it, the hold ends when the tool does. `seconds` limits it.
    """

    phase: str | None
    iteration: int | None = None
    nth: int = 0
    seconds: float | None = None
    owner: tuple[int, int] | None = None

    def comes(self, phase: str, iteration: int, nth: int) -> bool:
        """Whether its moment is this one."""
        return self.iteration in (None, iteration) and (self.phase is None or (self.phase, self.nth) == (phase, nth))


def folder_of(run_dir: Path, rank: int, pid: int) -> Path:
    """The folder in which a worker's observer and the tool meet."""
    return run_dir / FOLDER / f"{rank}-{pid}"


def write(path: Path, content: Any) -> None:
    """Write JSON atomically."""
    write_whole(path, json.dumps(content))


def arm(folder: Path, name: str, hold: Hold) -> Path:
    """Send a hold to the observer; returns the file whose removal lets the worker go on."""
    path = folder / (name + ARMED)
    write(path, hold.to_json())
    return path


def started_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def this_process() -> tuple[int, int]:
    """(pid, start) for `Hold.owner`."""
    ticks = started_ticks(os.getpid())
    assert ticks is not None
    return os.getpid(), ticks


def stand_still(path: Path, hold: Hold) -> None:
    """Return when the worker may go on (see the module)."""
    limit = None if hold.seconds is None else time.monotonic() + hold.seconds
    while path.exists() and (limit is None or time.monotonic() < limit):
        if hold.owner is not None and started_ticks(hold.owner[0]) != hold.owner[1]:
            return
        time.sleep(_PAUSE)


class ChaosObserver:
    """In a worker: holds the training thread at armed moments. Installed only if the launcher has `--chaos`.

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
            if hold.comes(phase, iteration, nth):
                del self._armed[name]
                at = {"phase": phase, "iteration": iteration, "action": str(action) if action else None,
                      "t": time.time()}
                write(self._folder / (name + REACHED), at)
                stand_still(self._folder / (name + ARMED), hold)
            elif hold.iteration is not None and self._newest > hold.iteration + 1:
                del self._armed[name]
                write(self._folder / (name + MISSED), {"iteration": iteration, "phase": phase})

    def _look(self) -> None:
        """Take in new holds, and drop withdrawn ones."""
        names = {entry[: -len(ARMED)] for entry in os.listdir(self._folder) if entry.endswith(ARMED)}
        answered = {Path(entry).stem for entry in os.listdir(self._folder) if entry.endswith((REACHED, MISSED))}
        self._armed = {name: hold for name, hold in self._armed.items() if name in names}
        for name in sorted(names - answered - set(self._armed)):
            try:
                self._armed[name] = Hold.from_json(json.loads((self._folder / (name + ARMED)).read_text()))
            except (OSError, ValueError):
                continue  # withdrawn meanwhile, or not from the tool


def observer_for(launched: Launched) -> ChaosObserver | None:
    """This worker's observer if its launcher has `--chaos`; else None."""
    if not launched.chaos or launched.run_dir is None or launched.rank is None:
        return None
    return ChaosObserver(folder_of(Path(launched.run_dir), launched.rank, os.getpid()))
