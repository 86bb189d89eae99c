"""A job as the launcher tells of it: a line when something happens, a table at the end."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.observe.events import format_event
from megatron_recycle.observe.runbook import ENDED, with_section
from megatron_recycle.observe.text import printable

log = logging.getLogger(__name__)

_TOLD = (
    "started", "suspected", "slow", "decided", "reconciled", "resumed", "refused", "hint", "leaving", "waiting",
    "restoring", "restored", "unreadable", "joined", "join_failed", "moving", "move_failed", "skipped", "left_out",
    "repeated", "save_failed", "saved", "ordered", "finished",
)
_AGAIN: Mapping[str, tuple[str, ...]] = {
    "started": (), "suspected": ("rank", "pid", "generation", "kind"), "joined": ("rank", "pid", "generation"),
    "moving": ("number", "to"), "move_failed": ("number", "to"),
}
"""Events that are told again after a reconnect, and the fields that make each the same."""
_EVERY = 1.0
"""Seconds between two lines about committed iterations."""


@dataclass
class Failure:
    """One worker's failure as it is shown; times in milliseconds since it was noticed."""

    worker: str
    rank: int
    pid: int
    kind: str
    iteration: int
    detected_ms: float
    resumed_ms: float | None = None
    plan: str = ""


class Summary:
    """Collects events, some of which come again after a reconnect; `add` returns the line to show now, if any."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.joined = 0
        self.moved = 0
        self.skipped = 0
        self.committed = 0
        self._latest = -1
        self.loss: float | str | None = None
        self.names: dict[int, str] = {}
        self.errors: dict[tuple[int, int], str] = {}
        """The errors that processes, by rank and pid, have failed with."""
        self._last = 0.0
        self._seen: set[tuple[Any, ...]] = set()
        self._odd = False

    def add(self, event: Mapping[str, Any]) -> str | None:
        """Raises nothing, whatever the event is like: no worker ends because of a line for people."""
        try:
            return self._add(event)
        except Exception:
            if not self._odd:
                self._odd = True
                log.exception("recycle: an event cannot be shown, and others like it are left out: %.300r", event)
            return None

    def _add(self, event: Mapping[str, Any]) -> str | None:
        name = event["event"]
        if self._known(event):
            return None
        if "error" in event and "pid" in event:
            self.errors[event["rank"], event["pid"]] = event["error"]
        if name == "explained":
            return _explained(event)
        if name == "last_copy":
            return _last_copy(event)
        if name == "last_host":
            return _last_host(event)
        if name == "started":
            self.names = {rank: name for name, rank in event["ranks"].items()}
            return _started(event)
        if name == "suspected" and event.get("removed", True):
            self._suspected(event)
        elif name == "planned":
            for failure in self._open():
                failure.plan = str(event.get("source", ""))
        elif name == "resumed":
            for failure in self._open():
                failure.resumed_ms = None if event.get("ms") is None else float(event["ms"])
        elif name == "restored":
            self._latest = event["iteration"]
        elif name == "skipped":
            self.skipped += 1
        elif name == "joined":
            self.joined += "moved_from" not in event
            self.moved += "moved_from" in event
        elif name == "committed":
            if event["iteration"] > self._latest:  # else a coordinator that took over tells of it again
                self.committed += 1
                self._latest = event["iteration"]
            self.loss = event.get("loss", self.loss)
            if time.monotonic() - self._last < _EVERY:
                return None
            self._last = time.monotonic()
            return _line(event)
        if name == "finished":  # the closing line has its words
            return _line({key: value for key, value in event.items() if key != "message"})
        moved = name == "left" and event.get("kind") == FailureKind.MOVE
        return _line(event) if moved or name in _TOLD else None

    def rank_of(self, event: Mapping[str, Any]) -> int | None:
        """The rank that an event is about; None: the job, or nobody that is known."""
        if isinstance(rank := event.get("rank"), int):
            return rank
        return next((rank for rank, worker in self.names.items() if worker == event.get("worker")), None)

    def _known(self, event: Mapping[str, Any]) -> bool:
        """Whether this event has come before."""
        name = event["event"]
        if name not in _AGAIN:
            return False
        key = (name, *(event.get(field) for field in _AGAIN[name]))
        again = key in self._seen
        self._seen.add(key)
        return again

    def _suspected(self, event: Mapping[str, Any]) -> None:
        self.failures.append(
            Failure(
                event["worker"],
                event["rank"],
                event["pid"],
                event["kind"],
                event["iteration"],
                float(event.get("ms", 0.0)),
                float(event.get("ms", 0.0)) if event.get("stranded") else None,  # training did not stop for it
            )
        )

    def _open(self) -> list[Failure]:
        return [failure for failure in self.failures if failure.resumed_ms is None]


def _started(event: Mapping[str, Any]) -> str:
    """With what the job can lose, where that may be news."""
    hidden = ("survival", "fatal_hosts")
    line = _line({key: value for key, value in event.items() if key not in hidden})
    several = len(set(event.get("hosts", {}).values())) > 1
    copies = len(event.get("grid", {}).get("microbatches", ())) > 1
    return f"{line}\nrecycle: {event['survival']}" if "survival" in event and (several or not copies) else line


def _explained(event: Mapping[str, Any]) -> str:
    """Why a worker has failed, and what takes its node out of service."""
    gpu, repair = event.get("gpu"), event.get("repair")
    return (f"recycle: {event['worker']} (rank {event['rank']}, pid {event['pid']}) on {event['host']}"
            f"{f', {gpu}' if gpu else ''}: {'; '.join(event['causes'])}"
            + (f". Take the node out: {repair}" if repair else ""))


def _last_copy(event: Mapping[str, Any]) -> str:
    """A warning: with what would follow, and what helps."""
    kept, hosts = event.get("kept_by") or {}, event.get("hosts") or {}
    held = ", ".join(f"stage {stage} has one worker left ({worker}"
                     + (f" on {hosts[stage]}" if stage in hosts else "")
                     + (f"; {kept[stage]} keeps a copy)" if stage in kept else ")")
                     for stage, worker in event["stages"].items())
    without, back = any(stage not in kept for stage in event["stages"]), event.get("checkpoint")
    lost = "; what only it has is lost with it"
    lost += "" if back is None else f", and all go back to the checkpoint of iteration {back}"
    lost += ": fill the empty places (max_restarts, `recycle run --join`), or begin with guard memory or --job-restarts"
    how = lost if without else ""
    return f"recycle: warning: {held}{how}"


def _last_host(event: Mapping[str, Any]) -> str:
    """A warning of what has changed with the last failure."""
    held = "; ".join([*(f"{host} has all workers that are left of stage {', '.join(map(str, stages))}"
                       for host, stages in event["hosts"].items()),
                      *(f"{host} has a part of each worker that holds shard {', '.join(map(str, shards))} of stage "
                        f"{stage}'s optimizer state"
                        for host, of in event.get("shards", {}).items() for stage, shards in of.items())])
    return f"recycle: warning: {held}: without that host the job cannot go on until workers have joined"


def _line(event: Mapping[str, Any]) -> str:
    """An event for people: of what stands in it worker by worker, they see the counts."""
    shown = {key: value for key, value in event.items() if key not in ("ranks", "hosts", "grid")}
    if "grid" in event:
        shown["pipelines"], shown["stages"] = len(event["grid"]["microbatches"]), event["grid"]["stages"]
    if "hosts" in event:
        shown["hosts"] = sorted(set(event["hosts"].values()))
    return format_event(shown)


def print_table(
    summary: Summary, rows: Sequence[tuple[int, int, str]], closing: str, informed: bool = True, late: bool = False,
    failed: bool = False,
) -> None:
    """The closing table on standard output: `rows` are (rank, pid, end), one for each process; `closing` is the last
    line. A host that is not `informed` cannot say how many were lost; one that came `late`, into a running job, knows
    of the iterations since; one that has `failed` names a section of the runbook. The end of a process that has
    reported its error is that error: whether it then had to be killed is of no interest. Lines and colours are for
    terminals."""
    from rich.box import HEAVY_HEAD
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty()
    # A file or pipe has no width; 100 columns hold the table.
    console = Console(file=sys.stdout, highlight=False, markup=False, width=None if terminal else 100)
    titles = ("rank", "worker", "pid", "end", "failure", "iteration", "detected", "training again", "plan")
    table = Table(*titles, box=HEAVY_HEAD if terminal else None)
    failures = {(failure.rank, failure.pid): failure for failure in summary.failures}
    for rank, pid, end in rows:
        failure = failures.get((rank, pid))
        end = summary.errors.get((rank, pid), end)
        cells = [""] * 5
        if failure is not None:
            resumed = "never" if failure.resumed_ms is None else f"{failure.resumed_ms:.0f} ms"
            detected = f"{failure.detected_ms:.0f} ms"
            cells = [failure.kind, str(failure.iteration), detected, resumed, failure.plan]
        table.add_row(str(rank), summary.names.get(rank, ""), str(pid), end, *cells)
    console.print(table)
    loss = "" if summary.loss is None else f", last loss {summary.loss}"
    again = sum(failure.resumed_ms is not None for failure in summary.failures)
    lost = f"{len(summary.failures)} workers lost, after {again} of them training went on"
    lost += f", {summary.joined} joined" if summary.joined else ""
    lost += f", {summary.moved} moved" if summary.moved else ""
    lost += f", {summary.skipped} micro-batches left out" if summary.skipped else ""
    if not informed:
        lost = "who else was lost is unknown: the coordinator was lost"
    committed = f"{summary.committed} iterations committed{' since this host asked to join' if late else ''}"
    line = f"recycle: {printable(closing)} ({committed}{loss}; {lost})"
    print(with_section(line, ENDED) if failed else line, flush=True)
