"""Jobs without failures, which others are compared with: each runs once in a run of the suite."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.harness import Job, Result

Body = Callable[..., Any]

_TIMES = ("heartbeat_interval", "heartbeat_timeout", "report_timeout", "stall_floor", "transport_timeout")
"""Settings that no bit depends on."""


def calm_run(body: Body, size: int, arguments: Mapping[str, Any]) -> dict[int, Result]:
    """What ``size`` workers of ``body`` end with, all of them well; nobody changes it.

    On gloo, whatever other jobs run on. Whichever process of the suite asks first runs the job, the others wait for it
    and read what it has left.
    """
    if "settings" in arguments:
        settings = {name: value for name, value in arguments["settings"].items() if name not in _TIMES}
        arguments = {**arguments, "settings": settings}
    text = f"{body.__module__} {body.__qualname__} {size} {json.dumps(arguments, sort_keys=True)}"
    path = Path(os.environ["SUITE_FOLDER"]) / f"reference-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(run(body, size, arguments)))
    return _read(path)


@functools.cache
def _read(path: Path) -> dict[int, Result]:
    return pickle.loads(path.read_bytes())


def run(body: Body, size: int, arguments: Mapping[str, Any]) -> dict[int, Result]:
    """A job without failures; everybody ends well."""
    with Job(body, size, arguments, rules=None) as job:
        results = job.wait()
        assert all(result.status == 0 for result in results.values()), job.where()
    return results
