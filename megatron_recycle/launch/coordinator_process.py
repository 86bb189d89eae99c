"""Starts the coordinator's process and learns where it listens."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from megatron_recycle.control.coordinator_spec import DEPOSED, CoordinatorSpec
from megatron_recycle.environment import COORDINATORS_MODULE, TOKEN
from megatron_recycle.errors import RecycleError
from megatron_recycle.launch.child import Child
from megatron_recycle.plan.value import Value

_START_LIMIT = 60.0
_END_LIMIT = 2.0
_LOG_LINES = 5
_MOST = 5
"""Most deaths in a row after which a service is still started again."""
_ASLEEP = 5.0
"""Seconds between two looks after which this process did not run."""
_LIFE = 60.0
"""Seconds after which a life breaks a row of deaths: an iteration may take that long."""


class Answer(Value, frozen=True):
    """First output of a coordinator's process: its address, or the reason why it does not listen. A standby goes on:
    what it ``waits`` for, at every change, and then where ``all`` will listen."""

    control: str = ""
    error: str | None = None
    waits: str | None = None
    all: str = ""


class Deaths:
    """Count of a coordinator's deaths without an iteration committed, or a longer life, in between.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._born = clock()

    def progress(self) -> None:
        """Reset the count: an iteration was committed."""
        self._count = 0

    def died(self, log: object) -> None:
        """Count one more; the next life begins. Raises RecycleError if there is to be none."""
        if self._clock() - self._born > _LIFE:
            self._count = 0
        self._count += 1
        self._born = self._clock()
        if self._count > _MOST:
            raise RecycleError(f"the coordinator has died {self._count} times in a row, without an iteration committed "
                               f"in between: see {log}")


class Silence:
    """Silence of a process, as far as this one was awake to hear it.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked = self._awake = clock()

    def since(self, heard: float) -> float:
        """Seconds since the process was ``heard``. Call it often: after a pause this one was asleep, stopped as a whole
        job may be, and the count begins anew."""
        now = self._clock()
        if now - self._looked > _ASLEEP:
            self._awake = now
        self._looked = now
        return now - max(heard, self._awake)


@dataclass
class Service:
    """The latest of a coordinator's processes, and its address, "host:port"."""

    child: Child
    control: str
    spec: CoordinatorSpec
    spawn: Callable[[CoordinatorSpec], Child]
    deaths: Deaths = field(default_factory=Deaths)
    linger: float = _END_LIMIT
    """Seconds that it has to end by itself at the end of the job, while others still hear of it."""
    standby: bool = False
    """Whether another coordinator may lead in its place."""
    begun: bool = False
    """Whether an iteration was committed."""
    later: bool = False
    """Whether it was started again, so that its output is still unread."""

    def progress(self) -> None:
        """Reset the count of deaths: an iteration was committed."""
        self.deaths.progress()
        self.begun = True

    def end_told(self) -> str:
        """Line for the user: which coordinator has ended, and what follows. One of several may have stood by."""
        if not self.standby:
            return f"the coordinator (pid {self.child.pid}) has died; starting it again"
        if self.child.status() == DEPOSED:
            return f"this host's coordinator (pid {self.child.pid}) leads no more; starting it again to stand by"
        return (f"this host's coordinator (pid {self.child.pid}) has died; starting it again to stand by (if it led, "
                "another host's does within seconds)")

    def bury(self) -> None:
        """Release the process, which has died; `revive` starts the next one.

        Raises:
            RecycleError: it has refused to start, or has died too often, so that there is no next one.
        """
        output = self._output() if self.later or self.standby else Answer()
        status = self.child.status() or 0
        refused = status > 0 and (output.error is not None or (self.later and not output.control))
        self.child.release()
        if refused:
            raise RecycleError(_not_started(self.child.log, output))
        if status != DEPOSED:
            self.deaths.died(self.child.log)

    def revive(self) -> None:
        """Start the coordinator of the same job again, at the same addresses. Does not wait until it listens: its
        clients retry until they can connect. Raises OSError where the host has no room for a process at present."""
        self.spec = replace(self.spec, port=int(self.control.rpartition(":")[2]), resume=True, begun=self.begun)
        self.child, self.later = self.spawn(self.spec), True

    def _output(self) -> Answer:
        """The unread lines of a process that has ended."""
        assert self.child.stdout is not None
        fields: dict[str, str] = {}
        for line in self.child.stdout.read().splitlines():
            fields |= json.loads(line)
        return Answer.from_json(fields)

    def stand_by(self, limit: float, say: Callable[[str], None]) -> str:
        """Wait until the coordinators of all hosts will listen; returns where, "host:port,host:port". The holder of the
        lease in their shared store leads; see `control.leader_election`.

        Raises:
            RecycleError: it did not start, or the other hosts do not come within ``limit`` seconds. It is ended then.
        """
        self.standby, hosts = True, self.spec.hosts
        say(f"recycle: this host's coordinator is at {self.control} when it leads; waiting for those of {hosts} hosts")
        output, until, why = Answer(waits=""), time.monotonic() + limit, ""
        while output.waits is not None:
            if output.waits:
                why = f" ({output.waits})"
                say(f"recycle: still waiting: {output.waits}")
            output = answer(self.child, until - time.monotonic())
        if not output.all:
            self.kill()
            late = (f"not all of {hosts} hosts have come to {self.spec.store} within {limit:.0f} s{why}; see "
                    f"{self.child.log}")
            raise RecycleError(f"the coordinator did not start: {output.error}" if output.error is not None else late)
        return output.all

    def kill(self) -> None:
        """Kill the process, which is no longer needed."""
        self.child.signal(signal.SIGKILL)
        self.child.wait(_END_LIMIT)
        self.child.release()

    def end(self) -> None:
        """Wait for the process, which ends by itself after its last connection; kill it if it does not."""
        if self.child.wait(self.linger) is None:
            self.kill()
        else:
            self.child.release()


def start(spec: CoordinatorSpec, run_dir: Path, token: str, environ: Mapping[str, str], tied: bool = True) -> Service:
    """Start the process, which dies with this one if it is ``tied``, and wait until it listens.

    Raises:
        RecycleError: it ended or said nothing; the message has the end of its log.
    """
    spawn = partial(_spawn, run_dir, token, environ, tied)
    try:
        child = spawn(spec)
    except OSError as error:
        raise RecycleError(f"the coordinator did not start: {error}") from error
    output = answer(child, _START_LIMIT)
    started = Service(child, output.control, spec, spawn)
    if not output.control:
        started.kill()
        raise RecycleError(_not_started(child.log, output))
    return started


def _spawn(run_dir: Path, token: str, environ: Mapping[str, str], tied: bool, spec: CoordinatorSpec) -> Child:
    command = [sys.executable, "-m", COORDINATORS_MODULE, "--run-dir", str(run_dir), json.dumps(spec.to_json())]
    return Child(command, {**environ, TOKEN: token, "OMP_NUM_THREADS": "1"}, run_dir / "coordinator.log",
                 stdout=subprocess.PIPE, tied=tied, deaf=True)


def _not_started(log: Path, output: Answer) -> str:
    """Message for a failed start; `output` has the reason, if the process could report it."""
    if output.error is not None:
        return f"the coordinator did not start: {output.error}"
    try:
        tail = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError as error:
        tail = [f"it cannot be read ({error.strerror})"]
    return "\n".join([f"the coordinator did not start; the end of {log}:", *tail])


def answer(child: Child, limit: float) -> Answer:
    """The next line on the child's standard output; empty if it ends, or none comes within ``limit`` seconds."""
    assert child.stdout is not None
    source, line, limit = child.stdout.fileno(), b"", time.monotonic() + limit
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, limit - time.monotonic())) or not (part := os.read(source, 1)):
                return Answer()
            line += part
    return Answer.from_json(json.loads(line))
