"""`python -m megatron_recycle.launch.health [RUN_DIR ...]`: a container's health check.

Status 0 if the coordinators of the jobs in these run folders (default: RECYCLE_RUN_DIR, or those in runs/) answer, or
no job has begun or is left; 1 if one does not answer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from megatron_recycle.errors import ConfigError
from megatron_recycle.launch import meeting
from megatron_recycle.launch.reachability import knock


def ill(folders: Iterable[Path]) -> list[str]:
    """One line for each folder whose job does not answer."""
    lines = []
    for folder in folders:
        try:
            found = meeting.read(folder)
        except ConfigError as error:
            lines.append(str(error))
            continue
        if found is not None and found.control and (why := knock(found.control, found.token)) is not None:
            lines.append(f"{folder}: nobody of this job answers at {found.control}: {why}")
    return lines


def main(arguments: list[str]) -> int:
    given = arguments or [os.environ[name] for name in ("RECYCLE_RUN_DIR",) if name in os.environ]
    found = ill(map(Path, given) if given else sorted(Path("runs").glob("*/")))
    print("\n".join(found) or "healthy")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
