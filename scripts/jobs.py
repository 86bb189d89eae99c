"""A training job under `recycle run`, watched and shot at from outside: for the quickstart and the benchmarks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_recycle.launch.child import Child
from megatron_recycle.launch.rundir import prepare

SCRIPTS = Path(__file__).resolve().parent
POLL = 0.005
"""Seconds between two looks at events.jsonl."""
_END_LIMIT = 15.0

Event = Mapping[str, Any]


class JobFailed(Exception):
    """The job did not end well, or not in time; the message has the end of the launcher's log."""


@dataclass
class Job:
    """`recycle run` with a script of this folder, as a context manager: nothing of it outlives the block.

    Args:
        script: name of the training script.
        arguments: its arguments.
        run_dir: logs and events go there; files of an earlier run in it are moved aside.
        nproc: workers.
        settings: RECYCLE_... variables without their prefix, in lower case.
        limit: seconds after which the job counts as hung.
    """

    script: str
    arguments: Sequence[str]
    run_dir: Path
    nproc: int
    settings: Mapping[str, str]
    limit: float

    def __enter__(self) -> Job:
        prepare(self.run_dir)
        self.pids: dict[str, int] = {}
        self._offset = 0
        self._deadline = time.monotonic() + self.limit
        environ = {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            **os.environ,
            **{f"RECYCLE_{name.upper()}": value for name, value in self.settings.items()},
        }
        command = [sys.executable, "-m", "megatron_recycle.cli", "run", "--nproc", str(self.nproc)]
        command += ["--run-dir", str(self.run_dir), "--show", "none", str(SCRIPTS / self.script), *self.arguments]
        self.log = self.run_dir / "launcher.log"
        self.log.unlink(missing_ok=True)
        self._child = Child(command, environ, self.log)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._child.status() is None:
            self._child.signal(signal.SIGTERM)  # the launcher ends its workers
            if self._child.wait(_END_LIMIT) is None:
                self._child.signal(signal.SIGKILL)  # they are tied to it
                self._child.wait(_END_LIMIT)
        self._child.release()

    def events(self) -> Iterator[Event]:
        """All events as they come, until the job has ended. Raises JobFailed if it is too slow."""
        while True:
            ended = self._child.status() is not None
            found = self._new_events()
            for event in found:
                self.pids = event.get("pids", self.pids)
                yield event
            if found:
                continue
            if ended:
                return
            if time.monotonic() > self._deadline:
                raise JobFailed(f"the job in {self.run_dir} takes longer than {self.limit:.0f} s{self._tail()}")
            time.sleep(POLL)

    def kill(self, worker: str) -> float:
        """SIGKILL to the process of `worker`; returns when (Unix seconds)."""
        moment = time.time()
        os.kill(self.pids[worker], signal.SIGKILL)
        return moment

    def check_ended_well(self) -> None:
        """Raises JobFailed unless the launcher ended with status 0."""
        status = self._child.wait(_END_LIMIT)
        if status != 0:
            raise JobFailed(f"the job in {self.run_dir} ended with status {status}{self._tail()}")

    def _new_events(self) -> list[Event]:
        path = self.run_dir / "events.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._offset)
            whole, _, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + 1 if whole else 0
        return [json.loads(line) for line in whole.splitlines()]

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-25:]
        return f"; the end of {self.log}:\n" + "\n".join(lines)


def exit_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that `with` blocks end what they started."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
