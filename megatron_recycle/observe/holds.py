"""How the tool and a worker's observer agree on a moment: through files in the run directory.

The observer makes a folder `chaos/RANK-PID/` when it begins. The tool puts `NAME.json`, a `Hold`, there. The observer
answers by `NAME.reached` and stands still, or by `NAME.missed`. It goes on once `NAME.json` is gone, once
`seconds` have passed, or once the tool has ended: a tool that dies does not hang the job.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = "chaos"
ARMED, REACHED, MISSED = ".json", ".reached", ".missed"


@dataclass(frozen=True)
class Hold:
    """Stand still at the `nth` (from 0) `phase` of `iteration`; None is any.

    `owner` is the tool's (pid, start in clock ticks): with it, the hold ends when the tool does. `seconds` limits it.
    """

    phase: str | None = None
    iteration: int | None = None
    nth: int = 0
    seconds: float | None = None
    owner: tuple[int, int] | None = None


def folder_of(run_dir: Path, rank: int, pid: int) -> Path:
    """The folder in which a worker's observer and the tool meet."""
    return run_dir / FOLDER / f"{rank}-{pid}"


def write(path: Path, content: Any) -> None:
    """Write JSON so that no reader meets half of it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.replace(path)


def arm(folder: Path, name: str, hold: Hold) -> Path:
    """Tell the observer; returns the file whose removal lets the worker go on."""
    path = folder / (name + ARMED)
    write(path, asdict(hold))
    return path


def read_hold(path: Path) -> Hold:
    """The hold in a file. Raises OSError, ValueError or TypeError if there is none."""
    fields = json.loads(path.read_text())
    owner = fields.pop("owner")
    return Hold(**fields, owner=None if owner is None else (int(owner[0]), int(owner[1])))


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


def stand_still(path: Path, hold: Hold, pause: float = 0.005) -> None:
    """Return when the worker may go on (see the module)."""
    limit = None if hold.seconds is None else time.monotonic() + hold.seconds
    while path.exists() and (limit is None or time.monotonic() < limit):
        if hold.owner is not None and started_ticks(hold.owner[0]) != hold.owner[1]:
            return
        time.sleep(pause)
