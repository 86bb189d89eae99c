"""What several tests compare with, and is made once in a run of the suite, by whichever of its processes asks first."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def once(what: str, make: Callable[[], T]) -> T:
    """What ``make`` gives, which ``what`` names; nobody changes it. The others wait for it and read what it has left.
    Outside a run of the suite each makes its own."""
    if "SUITE_FOLDER" not in os.environ:
        return make()
    name = hashlib.sha256(what.encode()).hexdigest()[:16]
    path = Path(os.environ["SUITE_FOLDER"]) / f"reference-{name}"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(make()))
    return _read(path)


@functools.cache
def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())
