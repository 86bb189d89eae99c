"""A training job under `recycle run`, watched and shot at from outside: for the quickstart and the benchmarks."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_recycle.config import variable
from megatron_recycle.control.ports import listen
from megatron_recycle.environment import TOKEN
from megatron_recycle.errors import ConfigError
from megatron_recycle.launch.child import Child
from megatron_recycle.launch.run_folder import prepare
from megatron_recycle.observe.events import EventReader

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
        settings: name of a setting -> its text.
        limit: seconds after which the job counts as hung.
        hosts: launchers, each with its share of the workers, as if each ran on a host of its own.
        restarts: how often the script may be started again; its events begin anew then.
    """

    script: str
    arguments: Sequence[str]
    run_dir: Path
    nproc: int
    settings: Mapping[str, str]
    limit: float
    hosts: int = 1
    restarts: int = 0

    def __enter__(self) -> Job:
        try:
            prepare(self.run_dir)
        except ConfigError as error:
            raise JobFailed(str(error)) from error
        self.pids: dict[str, int] = {}
        self._events = EventReader(self.run_dir / "events.jsonl")
        self._deadline = time.monotonic() + self.limit
        environ = {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            **os.environ,
            **{variable(name): value for name, value in self.settings.items()},
        }
        command = [sys.executable, "-m", "megatron_recycle.cli", "run", "--nproc", str(self.nproc // self.hosts)]
        command += ["--run-dir", str(self.run_dir), "--show", "none"]
        command += ["--job-restarts", str(self.restarts)] * (self.restarts > 0)
        script = [str(SCRIPTS / self.script), *self.arguments]
        several: list[list[str]] = [[]]
        if self.hosts > 1:
            environ[TOKEN] = secrets.token_hex(16)
            common = ["--nnodes", str(self.hosts), "--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
            several = [[*common, "--node-rank", str(node)] for node in range(self.hosts)]
        self.log = self.run_dir / "launcher.log"
        self.log.unlink(missing_ok=True)
        self._children = [Child([*command, *options, *script], environ, self.log) for options in several]
        self._child = self._children[0]
        return self

    def __exit__(self, *failure: object) -> None:
        for child in reversed(self._children):
            if child.status() is None:
                child.signal(signal.SIGTERM)  # the launcher ends its workers
                if child.wait(_END_LIMIT) is None:
                    child.signal(signal.SIGKILL)  # they are tied to it
                    child.wait(_END_LIMIT)
            child.release()

    def events(self) -> Iterator[Event]:
        """All events as they come, until the job has ended. Raises JobFailed if it is too slow."""
        path, number = self.run_dir / "events.jsonl", 0
        while True:
            ended = self._child.status() is not None
            with suppress(FileNotFoundError):
                if number not in (0, path.stat().st_ino):
                    self._events = EventReader(path)
                number = path.stat().st_ino
            found = self._events.new()
            for event in found:
                self.pids = event.get("pids", self.pids)
                if event["event"] == "joined":
                    self.pids = {**self.pids, event["worker"]: event["pid"]}
                yield event
            if found:
                continue
            if ended:
                return
            if time.monotonic() > self._deadline:
                raise JobFailed(f"the job in {self.run_dir} takes longer than {self.limit:.0f} s{self._tail()}")
            time.sleep(POLL)

    def kill(self, worker: str, number: signal.Signals = signal.SIGKILL) -> float:
        """SIGKILL to the process of `worker`; returns when (Unix seconds)."""
        moment = time.time()
        os.kill(self.pids[worker], number)
        return moment

    def kill_host(self, host: int) -> float:
        """SIGKILL to a host's launcher and so to all workers there, which are tied to it."""
        moment = time.time()
        os.kill(self._children[host].pid, signal.SIGKILL)
        return moment

    def check_ended_well(self) -> None:
        """Raises JobFailed unless the launcher ended with status 0."""
        status = self._child.wait(_END_LIMIT)
        if status != 0:
            raise JobFailed(f"the job in {self.run_dir} ended with status {status}{self._tail()}")

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-25:]
        return f"; the end of {self.log}:\n" + "\n".join(lines)


def _free_port() -> int:
    """A port that is free, as is the next one."""
    while True:
        with listen("127.0.0.1", 0) as first:
            port = int(first.getsockname()[1])
            with suppress(OSError), listen("127.0.0.1", port + 1):
                return port


def exit_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that `with` blocks end what they started."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


@contextmanager
def under_torchrun(arguments: Sequence[str], folder: Path, nproc: int) -> Iterator[Child]:
    """A script and its arguments without the plugin; torchrun, whose log is in ``folder``, and its workers end with the
    block."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    environ = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **os.environ}
    child = Child([*command, *arguments], environ, folder / "torchrun.log")
    try:
        yield child
    finally:
        if child.status() is None:
            child.signal(signal.SIGTERM)  # torchrun ends its workers
            if child.wait(_END_LIMIT) is None:
                child.signal(signal.SIGKILL)
                child.wait(5.0)
        child.release()
