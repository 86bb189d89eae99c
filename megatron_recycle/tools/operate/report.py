"""`recycle report [RUN]`: the cost of a job's failures, in GPU hours, as Markdown: by failure, by phase, by host.

A process of the grid counts as one GPU. The cost of a restart is not measured: it is the seconds that `--restart`
names, and the iterations since the newest checkpoint, once for each recovery.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from megatron_recycle.errors import ConfigError
from megatron_recycle.observe.events import read_events
from megatron_recycle.tools.operate.job_history import Absence, Event, JobHistory
from megatron_recycle.tools.operate.outlook import duration
from megatron_recycle.tools.operate.runs import EVENTS, add_run, folder_of, reading
from megatron_recycle.usage import seconds

PHASES = ("found", "planned", "reconciled", "training again")
"""Phases of a recovery, each from the end of the one before; the first one from the failure."""
_RESTART = 300.0
_OFTEN = 2
"""Workers lost on a host from which on the report names it."""


@dataclass
class Recovery:
    """One recovery: its lost workers, and the end of each phase, in seconds since the failure.

    `since` is when the first of them failed; `saved_age` how many seconds of training the newest checkpoint lacked.
    """

    lost: list[Absence] = field(default_factory=list)
    ends: dict[str, float] = field(default_factory=dict)
    since: float = 0.0
    saved_age: float = 0.0

    def phases(self) -> dict[str, float]:
        """Seconds of each known phase."""
        found, before = {}, 0.0
        for name in PHASES:
            if name in self.ends:
                found[name] = max(0.0, self.ends[name] - before)
                before = max(before, self.ends[name])
        return found


@dataclass(frozen=True)
class Account:
    """Account of a whole run.

    Attributes:
        begun, ended: Unix seconds of the first and the last event.
        worker_seconds: of workers that were in; `absent_seconds`: of positions that were empty.
        back: when an empty position was filled again, by the absence.
    """

    seen: JobHistory
    recoveries: Sequence[Recovery]
    begun: float
    ended: float
    worker_seconds: float
    absent_seconds: float
    back: Mapping[Absence, float]


def account(events: Iterable[Event]) -> Account:
    """The account of a run, from its events."""
    seen, done, now = JobHistory(), list[Recovery](), Recovery()
    begun = ended = 0.0
    worker_seconds = absent_seconds = 0.0
    saved: float | None = None
    back: dict[Absence, float] = {}
    for event in events:
        moment = float(event["t"])
        if seen.started:
            apart = max(0.0, moment - ended)
            worker_seconds += apart * len(seen.members)
            absent_seconds += apart * len(seen.out)
        begun, ended = begun or moment, max(ended, moment)
        before = dict(seen.out)
        seen.add(event)
        back |= {one: moment for name, one in before.items() if name not in seen.out}
        name = event["event"]
        if name in ("started", "checkpoint", "saved"):
            saved = moment
        elif name == "suspected" and event.get("removed") is not False:
            one = seen.out[event["worker"]]
            if not now.lost:
                now.since, now.saved_age = one.since, max(0.0, one.since - (saved or one.since))
            now.lost.append(one)
            now.ends.setdefault("found", moment - now.since)
        elif name in ("planned", "reconciled") and now.lost:
            now.ends.setdefault(name, moment - now.since)
        elif name == "resumed" and now.lost:
            now.ends["training again"] = moment - now.since
            done.append(now)
            now = Recovery()
    return Account(seen, done, begun, ended, worker_seconds, absent_seconds, back)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle report`."""
    add_run(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="Markdown (default: standard output)")
    parser.add_argument("--restart", type=seconds, default=_RESTART, metavar="SECONDS",
                        help="that this job would take from a failure to its next iteration if it were started again "
                        f"(default {_RESTART:g}): an assumption, which the report names")


def run(args: argparse.Namespace) -> int:
    """Print or write the report; returns 0. Raises ConfigError."""
    folder = folder_of(args.run)
    with reading(folder / EVENTS):
        text = markdown(folder.name, account(read_events(folder / EVENTS)), args.restart)
    if args.output is not None:
        try:
            args.output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{args.output} cannot be written: {error.strerror}") from error
        text = f"{args.output}\n"
    print(text, end="")
    return 0


def markdown(name: str, found: Account, restart: float) -> str:
    """The report."""
    seen, size = found.seen, found.seen.size
    stood, slower = seen.stood_still, max(0.0, seen.slower)
    end = "runs"
    if seen.finished:
        end = f"ended with status {seen.finished['status']}: {str(seen.finished['message']).rstrip('.')}"
    when = f"{_clock(found.begun)} to {_clock(found.ended)} ({duration(found.ended - found.begun)})"
    lines = [f"# {name}", "",
             f"{when}, {size} workers in {seen.grid[0]} pipelines of {seen.grid[1]} stages; {seen.committed} "
             f"iterations committed; {end}.", "",
             "| GPU hours | |", "| --- | --- |",
             f"| of workers that were in | {_hours(found.worker_seconds)} |",
             f"| lost standing still after {len(found.recoveries)} failures | {_hours(stood * size)} |",
             f"| lost in iterations that took longer while somebody was out | {_hours(slower * len(seen.members))} |",
             f"| of positions that were empty | {_hours(found.absent_seconds)} |"]
    if found.recoveries:
        again = sum(restart + one.saved_age for one in found.recoveries) * size
        lines += [f"| what as many restarts would have cost, of {restart:g} s each (assumed) and the work since the "
                  f"newest checkpoint | {_hours(again)} |",
                  f"| saved against that | {_hours(again - stood * size - slower * len(seen.members))} |"]
    return "\n".join([*lines, *_failures(found), *_phases(found.recoveries), *_hosts(seen), ""])


def _failures(found: Account) -> list[str]:
    if not found.seen.failures:
        return ["", "No worker was lost."]
    rows = ["", "## Failures", "", "| when | worker | host | kind | iteration | out for | error, or cause |",
            "| --- | --- | --- | --- | --- | --- | --- |"]
    for one in found.seen.failures:
        back = found.back.get(one)
        gone = duration((found.ended if back is None else back) - one.since) + ("" if back else ", still out")
        why = ("; ".join(one.causes) or one.why).replace("|", "\\|").replace("\n", " ")[:120]
        iteration = "" if one.iteration is None else str(one.iteration)
        cells = (_clock(one.since), one.worker, one.host, one.kind, iteration, gone, why)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _phases(recoveries: Sequence[Recovery]) -> list[str]:
    if not recoveries:
        return []
    rows = ["", "## Recoveries", "", "| phase | median | worst | all |", "| --- | --- | --- | --- |"]
    for name in PHASES:
        times = [phases[name] for one in recoveries if name in (phases := one.phases())]
        if times:
            rows.append(f"| {name} | {_ms(median(times))} | {_ms(max(times))} | {duration(sum(times))} |")
    whole = [max(one.ends.values()) for one in recoveries]
    return [*rows, f"| whole | {_ms(median(whole))} | {_ms(max(whole))} | {duration(sum(whole))} |"]


def _hosts(seen: JobHistory) -> list[str]:
    lost = Counter(one.host for one in seen.failures if one.host)
    often = [(host, count) for host, count in lost.most_common() if count >= _OFTEN]
    if not often or len(set(seen.hosts.values())) < 2:
        return []
    return ["", "## Repeat offenders", "", *(f"- {host}: {count} workers lost; `recycle drain {host}` and look at it"
                                            for host, count in often)]


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f}" if seconds >= 36 or seconds <= 0 else f"{seconds / 3600:.4f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
