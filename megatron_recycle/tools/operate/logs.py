"""`recycle logs [RUN] [WORKER ...]`: the workers' logs, the latest lines or as they grow, with the worker in front."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from megatron_recycle.control.operators import on_host
from megatron_recycle.errors import ConfigError
from megatron_recycle.membership.names import Process
from megatron_recycle.observe.text import printable
from megatron_recycle.tools.operate.job_history import JobHistory
from megatron_recycle.tools.operate.runs import add_names, folder_of, read, split
from megatron_recycle.usage import count

_LINES = 50
_PAUSE = 0.25
_MOST = 1 << 20
"""Bytes of a log's end that are read for its latest lines."""
_STAMP = re.compile(r"\[?(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)\Z")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Log(NamedTuple):
    """A file, and the prefix of its lines."""

    name: str
    path: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `recycle logs`."""
    add_names(parser)
    parser.add_argument("--host", default="", help="the workers of this host only")
    parser.add_argument("--failed", action="store_true", help="only those that were lost")
    parser.add_argument("--coordinator", action="store_true", help="the coordinator's log, too")
    parser.add_argument("-n", "--lines", type=count, default=_LINES, metavar="N", help=f"of each (default {_LINES})")
    parser.add_argument("--since", type=span, metavar="10m", help="no lines with an older time stamp: 30s, 10m, 2h")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as the logs grow, until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Print; returns 0, or 1 if there is no such log. Raises ConfigError."""
    oldest = None if args.since is None else time.time() - args.since
    folder, workers = split(args.names, args.run)
    folder = folder_of(folder)
    seen = read(folder).seen
    found = chosen(folder, seen, workers, args.host, args.failed)
    if args.coordinator:
        found.append(Log("coordinator", folder / "coordinator.log"))
    existing = [log for log in found if log.path.exists()]
    if missing := [log.name for log in found if log not in existing]:
        print(f"recycle logs: {', '.join(missing)}: not in {folder}; a host with a run folder of its own keeps its "
              "workers' logs there", file=sys.stderr)
    width = max((len(log.name) for log in existing), default=0)
    ends = {}
    for log in existing:
        lines, ends[log] = tail(log.path, args.lines, oldest)
        for line in lines:
            _print(log, line, width)
    if args.follow:
        for log, line in follow(ends):
            _print(log, line, width)
    return 0 if existing else 1


def span(text: str) -> float:
    """Seconds of ``10m`` and the like."""
    if (match := _SPAN.match(text)) is None:
        raise argparse.ArgumentTypeError(f"it is {text!r}; give a span of time: 30s, 10m, 2h, 1d")
    return float(match[1]) * _UNITS[match[2]]


def chosen(folder: Path, seen: JobHistory, workers: Sequence[str], host: str, failed: bool) -> list[Log]:
    """The requested logs, by rank. Before training has begun they have the rank for a name.

    Raises:
        ConfigError: there is no such worker, or host.
    """
    if not seen.ranks:
        if workers or host:
            raise ConfigError("training has not begun, so nobody knows which rank is which worker: leave WORKER and "
                              "--host out")
        paths = sorted(folder.glob("worker-*.log"), key=lambda path: (len(path.name), path.name))
        return [Log(path.stem.replace("worker-", "rank "), path) for path in paths]
    names = sorted(seen.ranks, key=lambda name: seen.ranks[name])
    for wanted in workers:
        if not any(wanted in (name, str(Process.parse(name).worker)) for name in names):
            raise ConfigError(f"worker {wanted} is not of this job, whose workers are {names[0]} to {names[-1]}")
    if host and not any(on_host(seen.hosts.get(name, ""), host) for name in names):
        raise ConfigError(f"no worker is on a host {host}: the job's hosts are "
                          f"{', '.join(sorted(set(seen.hosts.values())))}")
    lost = {one.worker for one in seen.failures}
    return [Log(name, folder / f"worker-{seen.ranks[name]}.log") for name in names
            if (not workers or name in workers or str(Process.parse(name).worker) in workers)
            and (not host or on_host(seen.hosts.get(name, ""), host)) and (not failed or name in lost)]


def tail(path: Path, lines: int, oldest: float | None = None) -> tuple[list[str], int]:
    """The last ``lines`` of a log, none before ``oldest`` as far as they have time stamps, and its end offset."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - _MOST))
        text = file.read(end).decode(errors="replace")
    found = text.splitlines()[1 if end > _MOST else 0:]
    if oldest is not None:
        found = _younger(found, oldest)
    return (found[-lines:] if lines else []), end


def _younger(lines: Sequence[str], oldest: float) -> list[str]:
    """The lines from the first young enough stamp on; a line without a stamp goes with the line before."""
    for number, line in enumerate(lines):
        moment = stamp(line)
        if moment is not None and moment >= oldest:
            return list(lines[number:])
    return [] if any(stamp(line) is not None for line in lines) else list(lines)


def stamp(line: str) -> float | None:
    """Unix seconds of the time at the beginning of a line, in this host's time zone; None: there is none."""
    match = _STAMP.match(line)
    if match is None:
        return None
    try:
        return datetime.fromisoformat(match[1].replace(",", ".")).timestamp()
    except ValueError:
        return None


def follow(ends: dict[Log, int]) -> Iterator[tuple[Log, str]]:
    """New lines as they come, for ever. A log that has become shorter is read from its beginning."""
    parts = dict.fromkeys(ends, b"")
    while True:
        for log in ends:
            size = log.path.stat().st_size if log.path.exists() else 0
            if size < ends[log]:
                ends[log], parts[log] = 0, b""
            if size > ends[log]:
                with log.path.open("rb") as file:
                    file.seek(ends[log])
                    *whole, parts[log] = (parts[log] + file.read(size - ends[log])).split(b"\n")
                ends[log] = size
                for line in whole:
                    yield log, line.decode(errors="replace")
        time.sleep(_PAUSE)


def _print(log: Log, line: str, width: int) -> None:
    print(f"{log.name:{width}} | {printable(line)}", flush=True)
