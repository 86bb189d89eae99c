"""The launcher's account of a job: a line for each event, a table at the end."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.observe import event_kinds as kinds
from megatron_recycle.observe.events import format_event
from megatron_recycle.observe.runbook import ENDED, with_section
from megatron_recycle.observe.text import printable

log = logging.getLogger(__name__)

_SHOWN = (
    "started", "suspected", "slow", "decided", "reconciled", "resumed", "refused", "hint", "leaving", "waiting",
    "restoring", "restored", "unreadable", "joined", "join_failed", "moving", "move_failed", "skipped", "left_out",
    "repeated", "save_failed", "saved", "ordered", "finished",
)
_AGAIN: Mapping[str, tuple[str, ...]] = {
    "started": (), "suspected": ("rank", "pid", "generation", "kind"), "joined": ("rank", "pid", "generation"),
    "moving": ("number", "to"), "move_failed": ("number", "to"),
}
"""Events that are repeated after a reconnect, and the fields that identify each."""
_EVERY = 1.0
"""Seconds between two lines about committed iterations."""


@dataclass
class Failure:
    """One worker's failure for display; training went on `resumed_ms` after it was noticed."""

    suspected: kinds.Suspected
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
        """Errors that processes have failed with, by rank and pid."""
        self._last = 0.0
        self._seen: set[tuple[Any, ...]] = set()
        self._odd = False

    def add(self, event: Mapping[str, Any]) -> str | None:
        """Take in any event; returns the line to show, if any. Raises nothing: no worker ends because of a line for
        people."""
        try:
            return self._add(event)
        except Exception:
            if not self._odd:
                self._odd = True
                log.exception("recycle: an event cannot be shown, and others like it are left out: %.300r", event)
            return None

    def _add(self, event: Mapping[str, Any]) -> str | None:
        name = kinds.Named.from_json(event).event
        if self._known(name, event):
            return None
        fields = kinds.KINDS[name].from_json(event) if name in kinds.KINDS else None
        match fields:
            case kinds.Explained():
                return _explained(fields)
            case kinds.LastCopy():
                return _last_copy(fields)
            case kinds.LastHost():
                return _last_host(fields)
            case kinds.Started():
                self.names = {rank: worker for worker, rank in fields.ranks.items()}
                return _started(fields, event)
            case kinds.Suspected():
                if fields.error is not None:
                    self.errors[fields.rank, fields.pid] = fields.error
                if fields.removed:
                    at_once = fields.ms if fields.stranded else None  # training did not stop for a stranded one
                    self.failures.append(Failure(fields, at_once))
            case kinds.Planned():
                for failure in self._open():
                    failure.plan = fields.source
            case kinds.Resumed():
                for failure in self._open():
                    failure.resumed_ms = fields.ms
            case kinds.Restored():
                self._latest = fields.iteration
            case kinds.Joined():
                self.joined += fields.moved_from is None
                self.moved += fields.moved_from is not None
            case kinds.Committed():
                if fields.iteration > self._latest:  # otherwise a repetition by a coordinator that took over
                    self.committed += 1
                    self._latest = fields.iteration
                self.loss = self.loss if fields.loss is None else fields.loss
                if time.monotonic() - self._last < _EVERY:
                    return None
                self._last = time.monotonic()
                return format_event(event)
        self.skipped += name == "skipped"
        if name == "finished":  # the closing line has its words
            return format_event({key: value for key, value in event.items() if key != "message"})
        moved = isinstance(fields, kinds.Left) and fields.kind == FailureKind.MOVE
        return format_event(event) if moved or name in _SHOWN else None

    def rank_of(self, event: Mapping[str, Any]) -> int | None:
        """The rank that an event is about; None: the job, or an unknown process."""
        about = kinds.Ranked.from_json(event)
        if isinstance(about.rank, int):
            return about.rank
        return next((rank for rank, worker in self.names.items() if worker == about.worker), None)

    def _known(self, name: str, event: Mapping[str, Any]) -> bool:
        """Whether this event is a repetition."""
        if name not in _AGAIN:
            return False
        key = (name, *(event.get(field) for field in _AGAIN[name]))
        again = key in self._seen
        self._seen.add(key)
        return again

    def _open(self) -> list[Failure]:
        return [failure for failure in self.failures if failure.resumed_ms is None]


def _started(fields: kinds.Started, event: Mapping[str, Any]) -> str:
    """Start line, with the failures that the job survives, where that may be news; per-worker facts are counts here."""
    hidden = ("survival", "fatal_hosts", "ranks", "hosts", "grid")
    shown = {key: value for key, value in event.items() if key not in hidden}
    if fields.grid is not None:
        shown |= {"pipelines": fields.grid.pipelines, "stages": fields.grid.stages}
    hosts = sorted(set(fields.hosts.values()))
    line = format_event({**shown, "hosts": hosts})
    copies = fields.grid is not None and fields.grid.pipelines > 1
    return f"{line}\nrecycle: {fields.survival}" if fields.survival is not None and (
        len(hosts) > 1 or not copies) else line


def _explained(fields: kinds.Explained) -> str:
    """Why a worker has failed, and what takes its node out of service."""
    return (f"recycle: {fields.worker} (rank {fields.rank}, pid {fields.pid}) on {fields.host}"
            f"{f', {fields.gpu}' if fields.gpu else ''}: {'; '.join(fields.causes)}"
            + (f". Take the node out: {fields.repair}" if fields.repair else ""))


def _last_copy(fields: kinds.LastCopy) -> str:
    """A warning, with the consequence and the remedy."""
    kept = fields.kept_by or {}
    held = ", ".join(f"stage {stage} has one worker left ({worker}"
                     + (f" on {fields.hosts[stage]}" if stage in fields.hosts else "")
                     + (f"; {kept[stage]} keeps a copy)" if stage in kept else ")")
                     for stage, worker in fields.stages.items())
    lost = "; what only it has is lost with it"
    lost += "" if fields.checkpoint is None else f", and all go back to the checkpoint of iteration {fields.checkpoint}"
    lost += ": fill the empty places (max_restarts, `recycle run --join`), or begin with guard memory or --job-restarts"
    return f"recycle: warning: {held}{lost if any(stage not in kept for stage in fields.stages) else ''}"


def _last_host(fields: kinds.LastHost) -> str:
    """A warning about the change that the last failure made."""
    held = "; ".join([*(f"{host} has all workers that are left of stage {', '.join(map(str, stages))}"
                       for host, stages in fields.hosts.items()),
                      *(f"{host} has a part of each worker that holds shard {', '.join(map(str, shards))} of stage "
                        f"{stage}'s optimizer state"
                        for host, of in fields.shards.items() for stage, shards in of.items())])
    return f"recycle: warning: {held}: without that host the job cannot go on until workers have joined"


def print_table(
    summary: Summary, rows: Sequence[tuple[int, int, str]], closing: str, informed: bool = True, late: bool = False,
    failed: bool = False,
) -> None:
    """Print the closing table on standard output: `rows` are (rank, pid, end), one for each process; `closing` is the
    last line. A host that is not `informed` cannot say how many were lost; one that came `late`, into a running job,
    knows of the iterations since; one that has `failed` names a section of the runbook. The end of a process that has
    reported its error is that error, even if it then had to be killed. Lines and colours are for terminals."""
    from rich.box import HEAVY_HEAD
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty()
    # A file or pipe has no width; 100 columns hold the table.
    console = Console(file=sys.stdout, highlight=False, markup=False, width=None if terminal else 100)
    titles = ("rank", "worker", "pid", "end", "failure", "iteration", "detected", "training again", "plan")
    table = Table(*titles, box=HEAVY_HEAD if terminal else None)
    failures = {(failure.suspected.rank, failure.suspected.pid): failure for failure in summary.failures}
    for rank, pid, end in rows:
        failure = failures.get((rank, pid))
        end = summary.errors.get((rank, pid), end)
        cells = [""] * 5
        if failure is not None:
            resumed, was = "never" if failure.resumed_ms is None else f"{failure.resumed_ms:.0f} ms", failure.suspected
            cells = [was.kind, str(was.iteration), f"{was.ms:.0f} ms", resumed, failure.plan]
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
