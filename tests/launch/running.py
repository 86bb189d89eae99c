"""A `recycle run` in a process of its own, with what tests do to it. Every wait has a hard limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_recycle.observe.events import read_events
from tests.labels import check_label
from tests.observe.events_page import fault

ROOT = Path(__file__).parents[2]
FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
LIMIT = 80.0
"""Seconds for a whole job."""


@dataclass
class Running:
    """A launched job of fake workers; pipelines = nproc / 2, stages = 2."""

    process: subprocess.Popen[str]
    folder: Path
    output: Path
    deadline: float = field(default_factory=lambda: time.monotonic() + LIMIT)
    _read: tuple[tuple[int, int], list[dict[str, Any]]] = ((0, 0), [])

    @property
    def events(self) -> list[dict[str, Any]]:
        """Read again only if there are more, or those of another run."""
        path = self.folder / "events.jsonl"
        if not path.exists():
            return []
        stat = path.stat()
        if (now := (stat.st_ino, stat.st_size)) != self._read[0]:
            self._read = now, read_events(path)
        return self._read[1]

    def until(self, found: Callable[[], Any], what: str) -> Any:
        """What `found` gives once it gives something."""
        while True:
            if result := found():
                return result
            assert time.monotonic() < self.deadline, f"no {what}\n{self.where()}"
            time.sleep(0.005)

    def event(self, name: str, **fields: Any) -> dict[str, Any]:
        """The first event of this name with these fields."""

        def matching() -> dict[str, Any] | None:
            wanted = {"event": name, **fields}
            return next((e for e in self.events if all(e.get(k) == v for k, v in wanted.items())), None)

        return self.until(matching, f"event {name} {fields}")

    def paused(self, *ranks: int) -> list[int]:
        """Pids of these ranks, once all of them stand still."""

        def pids() -> list[int]:
            files = [self.folder / f"paused-{rank}" for rank in ranks]
            texts = [file.read_text() for file in files if file.exists()]
            return [int(text) for text in texts] if len([t for t in texts if t]) == len(ranks) else []

        return self.until(pids, f"pause of {ranks}")

    def go_on(self, *ranks: int) -> None:
        for rank in ranks:
            (self.folder / f"paused-{rank}").unlink(missing_ok=True)  # a stop wakes them, too

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> float:
        """Send a signal to workers that stand still; returns the time."""
        pids = self.paused(*ranks)
        moment = time.time()
        for pid in pids:
            os.kill(pid, number)
        return moment

    def wait(self) -> int:
        """The launcher's exit status."""
        try:
            status = self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job hangs\n{self.where()}") from None
        assert not (faults := [why for event in self.events if (why := fault(event))]), faults
        return status

    def coordinator(self) -> int:
        """Pid of the coordinator's process; 0: there is none."""
        return next((pid for pid in self.children() if b"control.process" in _command(pid)), 0)

    def children(self) -> list[int]:
        """Live processes of this job (all of them have its folder in their environment)."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                try:
                    environ = (entry / "environ").read_bytes()
                except OSError:
                    continue
                if str(self.folder).encode() in environ:
                    found.append(int(entry.name))
        return found

    def where(self) -> str:
        """Where each process stood."""
        parts = [f"launcher: {self.process.poll()}\n{self.output.read_text()}"]
        parts += [json.dumps(event) for event in self.events[-25:]]
        parts += [f"--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.glob("*.log"))]
        return "\n".join(parts)


def _command(pid: int) -> bytes:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""  # it has ended meanwhile


@contextmanager
def launched(
    folder: Path,
    orders: Mapping[str, Any],
    *,
    nproc: int = 6,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    script: Path = FAKE_WORKER,
    starter: Callable[[], None] | None = None,
    sink: int | None = None,
) -> Iterator[Running]:
    """Start a job; whatever happens, nothing of it is left afterwards. `starter` runs in its process before it, and
    `sink` gets its output in the place of a file."""
    check_label()
    command = [sys.executable, str(Path(__file__).with_name("start.py"))]
    command += ["--nproc", str(nproc), "--run-dir", str(folder), *options, str(script)]
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RECYCLE_RUN_DIR": str(folder),
        "RECYCLE_FAKE": json.dumps({"iterations": 4, **orders}),
        **(environ or {}),
    }
    output = folder.parent / f"{folder.name}.out"
    with output.open("w") as file:
        out = file if sink is None else sink
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, text=True,
                                   preexec_fn=starter)  # noqa: PLW1509 - tests have few threads
    running = Running(process, folder, output)
    try:
        yield running
    finally:
        end(running, process)


def end(job: Running, *launchers: subprocess.Popen[str]) -> None:
    """Kill the launchers of a job; its processes are tied to them."""
    for launcher in launchers:
        launcher.kill()
        launcher.wait()
    limit = time.monotonic() + 60
    while (left := job.children()) and time.monotonic() < limit:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes outlived a killed launcher: {left}"
