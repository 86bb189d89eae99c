"""Jobs without failures, which others are compared with: each runs once in a run of the suite."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tests.harness import Job, Result
from tests.once import once

Body = Callable[..., Any]

_TIMES = ("heartbeat_interval", "heartbeat_timeout", "report_timeout", "stall_floor", "transport_timeout")
"""Settings that no bit depends on."""


def calm_run(body: Body, size: int, arguments: Mapping[str, Any]) -> dict[int, Result]:
    """What ``size`` workers of ``body`` end with, all of them well; nobody changes it.

    On gloo, whatever other jobs run on.
    """
    if "settings" in arguments:
        settings = {name: value for name, value in arguments["settings"].items() if name not in _TIMES}
        arguments = {**arguments, "settings": settings}
    text = f"{body.__module__} {body.__qualname__} {size} {json.dumps(arguments, sort_keys=True)}"
    return once(text, lambda: run(body, size, arguments))


def run(body: Body, size: int, arguments: Mapping[str, Any]) -> dict[int, Result]:
    """A job without failures; everybody ends well."""
    with Job(body, size, arguments, rules=None) as job:
        results = job.wait()
        assert all(result.status == 0 for result in results.values()), job.where()
    return results
