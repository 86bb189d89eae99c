"""`recycle watch [RUN]`: alarms (`--on-event`), metrics and a page of a job, from its run folder.

A process of its own, which reads the events as they come, and now and then checks that the coordinator answers.
`recycle run` and `recycle serve` start one themselves where the job's coordinator is, so that there is one for each
job. It can also be started by hand, for a job that runs already, on any host that sees the run's folder.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_recycle.errors import ConfigError, RecycleError
from megatron_recycle.launch import devices, watching
from megatron_recycle.launch.meeting import Meeting
from megatron_recycle.launch.worker_command import say_to
from megatron_recycle.observe.disk import write_whole
from megatron_recycle.observe.events import EventReader
from megatron_recycle.tools.operate.alarm_hook import Hook
from megatron_recycle.tools.operate.alarms import Alarm, Alarms, Rate, to_json
from megatron_recycle.tools.operate.ask import Refused, Unreachable, add_token_file, ask, secret
from megatron_recycle.tools.operate.job_history import JobHistory
from megatron_recycle.tools.operate.metrics import Exporter, Watched, write_discovery
from megatron_recycle.tools.operate.outlook import Facts
from megatron_recycle.tools.operate.page.state import History, schedule, state
from megatron_recycle.tools.operate.runs import EVENTS, add_run, folder_of, meeting_of

_PAUSE = 0.25
"""Seconds between looks at the events."""
_ASK = 15.0
"""Seconds between queries to the coordinator."""
_SOON = 2.0
"""Seconds that it has to answer for the page."""
_UNANSWERED = 4
"""Unanswered queries in a row before the coordinator counts as unreachable: a minute."""
_FILE = 5.0
"""Seconds between two files for a node exporter."""
_OLD = 60.0
"""Seconds: older events are no alarm. A watcher may begin in the midst of a job, or again."""
_AFTERWARDS = 30.0
"""Seconds that the script may take to be started again after the end of a job's life."""
_NICE = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle watch`."""
    add_run(parser)
    watching.add_arguments(parser)
    add_token_file(parser)


def run(args: argparse.Namespace) -> int:
    """Watch until the job is over, or SIGTERM comes; returns 0. Raises ConfigError."""
    watching.check(args)
    if not watching.wanted(args):
        raise ConfigError("there is nothing to do: give --on-event, --metrics, --textfile or --page")
    os.nice(_NICE)
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    watcher = Watcher(folder_of(args.run), args, say_to(sys.stderr))
    try:
        watcher.watch(done)
    finally:
        watcher.close()
    return 0


class Watcher:
    """See the module. ``say`` gets a line for each error. Raises ConfigError."""

    def __init__(self, folder: Path, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._args = args
        self._say = say
        self._seen = JobHistory()
        self._reader = EventReader(folder / EVENTS)
        self._alarms = Alarms(60 * args.degraded_after)
        self._rate = Rate()
        self._counts: Counter[str] = Counter()
        self._closing = ExitStack()
        self._hook = None if args.on_event is None else Hook(args.on_event, say)
        self._lock = threading.Lock()
        self._silent, self._unanswered = "", 0
        self._meeting: Meeting | None = None
        self._asked, self._written = time.monotonic() - _ASK + 1.0, time.monotonic()
        self._odd = self._unwritten = False
        self._exporter: Exporter | None = None
        self._history = History()
        if args.metrics is not None or args.textfile is not None:
            self._exporter = Exporter(folder.name, self._watched)
        if self._exporter is not None and args.metrics is not None:
            host, port = watching.address(args.metrics)
            port = self._exporter.serve(host, port)
            self._closing.callback(self._exporter.close)
            say(f"recycle: metrics at http://{host}:{port}/metrics")
            if args.metrics_sd is not None:
                write_discovery(args.metrics_sd, f"{watching.name_of(host)}:{port}", {"run": folder.name})
                self._closing.callback(args.metrics_sd.unlink, missing_ok=True)
        if args.page is not None:
            self._serve(*watching.address(args.page, "--page"))

    def watch(self, done: threading.Event) -> None:
        """Watch until ``done`` is set, or the job is over; all events up to then are handled."""
        while not done.wait(_PAUSE):
            self.look()
            moment = self._seen.finished.get("t")
            if moment is not None and not self._args.until_told and time.time() - moment > _AFTERWARDS:
                break
        self.look()
        self._write()

    def look(self) -> None:
        """Take in the events since the last look."""
        self._ask()
        found: list[Alarm] = []
        with self._lock:
            for event in self._new():
                try:
                    self._seen.add(event)
                    self._history.add(event, self._seen)
                    found += self._alarms.add(event, self._seen)
                except (KeyError, TypeError, ValueError) as error:
                    self._strange(error)
            facts = self._facts()
            found += self._alarms.tick(facts)
        self._tell(found, facts)
        if time.monotonic() - self._written >= _FILE:
            self._write()

    def _new(self) -> list[dict[str, Any]]:
        try:
            return self._reader.new()
        except (OSError, ValueError) as error:
            self._strange(error)
            return []

    def _strange(self, error: Exception) -> None:
        if not self._odd:
            self._odd = True
            self._say(f"recycle: some events of {self._folder} cannot be read and are left out: {error!r:.200}")

    def close(self) -> None:
        """Wait for the last commands, and stop serving."""
        if self._hook is not None:
            self._hook.close()
        self._closing.close()

    def _serve(self, host: str, port: int) -> None:
        """Serve the page, with a secret where other hosts can reach it. Raises ConfigError."""
        from megatron_recycle.tools.operate.page.server import SECRET, Server, is_loopback, secret_of

        hidden = None
        if not is_loopback(host):
            hidden = secret_of(secret(meeting_of(self._folder), self._args.token_file))
            write_whole(self._folder / SECRET, hidden + "\n")
        page = Server(self._shown, self._planned, hidden)
        port = page.start(host, port)
        self._closing.callback(page.close)
        where = f"http://{watching.name_of(host)}:{port}/"
        self._say(f"recycle: page at {where}" + (f"?token=... (as {self._folder / SECRET} has it)" if hidden else ""))

    def _shown(self) -> dict[str, Any]:
        """The page's current content. Called by its thread."""
        reply, silent, found = None, "", self._meeting
        with self._lock:
            over = bool(self._seen.finished)
        try:
            found = found or meeting_of(self._folder)
            if not over and found is not None:
                reply = ask(found.control, secret(found, self._args.token_file), "status", limit=_SOON)
        except (Unreachable, Refused, ConfigError) as error:
            silent = str(error)
        with self._lock:
            facts = replace(self._facts(), told=reply, silent=silent, meeting=found, gpus=devices.read(self._folder))
            return state(facts, self._history)

    def _planned(self, pipeline: int | None) -> dict[str, Any]:
        return schedule(self._folder, self._seen.digest, pipeline)

    def _tell(self, alarms: Iterable[Alarm], facts: Facts) -> None:
        now = time.time()
        for alarm in alarms:
            if now - alarm.t > _OLD:
                continue
            self._counts[alarm.name] += 1
            if self._hook is not None and (before := self._rate.lets(alarm, now)) is not None:
                self._hook.tell(to_json(alarm, facts, before))

    def _ask(self) -> None:
        """Check now and then that the coordinator answers."""
        if time.monotonic() - self._asked < _ASK or self._seen.finished or not self._seen.started:
            return
        self._asked = time.monotonic()
        try:
            found = self._meeting = meeting_of(self._folder)
            if found is None:
                return
            ask(found.control, secret(found, self._args.token_file), "status")
            self._silent, self._unanswered = "", 0
        except (Unreachable, Refused, ConfigError) as error:
            self._unanswered += 1
            self._silent = str(error) if self._unanswered >= _UNANSWERED else ""

    def _facts(self) -> Facts:
        return Facts(self._seen, time.time(), str(self._folder), silent=self._silent, meeting=self._meeting)

    def _watched(self) -> Watched:
        with self._lock:
            facts = self._facts()
            failed = 0 if self._hook is None else self._hook.failed
            return Watched(facts, dict(self._counts), self._rate.held_back, failed)

    def _write(self) -> None:
        self._written = time.monotonic()
        if self._exporter is None or self._args.textfile is None:
            return
        try:
            self._exporter.write(self._args.textfile)
            self._unwritten = False
        except (OSError, RecycleError) as error:
            if not self._unwritten:
                self._unwritten = True
                self._say(f"recycle: --textfile {self._args.textfile} cannot be written: {error}")
