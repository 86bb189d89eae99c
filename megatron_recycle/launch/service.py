"""Starts the coordinator's process and learns where it listens."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_recycle.errors import RecycleError
from megatron_recycle.launch.child import Child

_START_LIMIT = 60.0
_TOLD_LINES = 5


@dataclass(frozen=True)
class Services:
    """Addresses of a job: "host:port" of its coordinator, and the port of torch's store, if it has one."""

    control: str
    store: int | None


def start_coordinator(
    *,
    size: int,
    run_dir: Path,
    token: str,
    interface: str,
    environ: Mapping[str, str],
    port: int = 0,
    store_port: int = 0,
    options: Sequence[str] = (),
    tied: bool = True,
) -> tuple[Child, Services]:
    """Start the process and wait until it listens.

    Raises:
        RecycleError: it ended or said nothing; the message has the end of its log.
    """
    command = [sys.executable, "-m", "megatron_recycle.launch.coordinate"]
    command += ["--size", str(size), "--run-dir", str(run_dir), "--interface", interface]
    command += ["--port", str(port), "--store-port", str(store_port), *options]
    environ = {**environ, "RECYCLE_TOKEN": token, "OMP_NUM_THREADS": "1"}
    child = Child(command, environ, run_dir / "coordinator.log", stdout=subprocess.PIPE, tied=tied)
    line = _first_line(child)
    if line is None:
        child.signal(9)
        child.wait(5)
        child.release()
        tail = "\n".join(child.log.read_text(errors="replace").splitlines()[-_TOLD_LINES:])
        raise RecycleError(f"the coordinator did not start; the end of {child.log}:\n{tail}")
    services = json.loads(line)
    return child, Services(services["control"], services["store"])


def _first_line(child: Child) -> bytes | None:
    """The first line on the child's standard output; None if it ends or takes too long."""
    assert child.stdout is not None
    source, line, limit = child.stdout.fileno(), b"", time.monotonic() + _START_LIMIT
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, limit - time.monotonic())):
                return None
            part = os.read(source, 4096)
            if not part:
                return None
            line += part
    return line
