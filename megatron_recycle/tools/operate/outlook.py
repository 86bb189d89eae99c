"""Verdict on a job: its state, what would end it next, and the repair. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from megatron_recycle.launch.meeting import Meeting
from megatron_recycle.membership import failure_domains
from megatron_recycle.membership.names import Process
from megatron_recycle.membership.state import State
from megatron_recycle.tools.operate.job_history import JobHistory

_STALLED, _STALLED_ITERATIONS = 60.0, 10
"""Seconds, and iterations, without a commit after which a job that trains counts as stalled."""
_FORMING = 900.0
"""Seconds after which a job that has not begun to train is at risk."""
_ASKED = (130, 143)
"""Statuses of a job that ended on request: by Ctrl-C or `recycle stop`, by SIGTERM."""
_NAMED = 3
"""Workers or hosts that a line names."""


class Level(IntEnum):
    """State of a job; the number is the exit status of `recycle status`."""

    HEALTHY = 0
    DEGRADED = 1
    AT_RISK = 2
    OVER = 3


@dataclass(frozen=True)
class Facts:
    """All known facts about a job at a moment.

    Attributes:
        now: Unix seconds.
        run: the run's folder, as commands name it.
        state: from the journal; None where it cannot be read.
        told: the coordinator's answer; None if it has not answered, and then `silent` says why.
        gpus: of each rank, as far as the hosts have written it down.
        problems: unreadable sources, one line each.
    """

    seen: JobHistory
    now: float
    run: str
    state: State | None = None
    told: Mapping[str, Any] | None = None
    silent: str = ""
    meeting: Meeting | None = None
    gpus: Mapping[int, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        """Whether the job has ended, by its events or by its journal."""
        return bool(self.seen.finished) or (self.state is not None and self.state.ended is not None)

    @property
    def hosts(self) -> dict[str, str]:
        """Host of each current member's process. A launcher that brings workers back counts as a host of its own
        (``n3/7`` beside ``n3/0``), except where there is one machine only."""
        found = {name: self.seen.hosts.get(name, "") for name in self.seen.members}
        if self.told is not None:
            found = {name: one["host"] for name, one in self.told["workers"].items()}
        elif self.state is not None and self.state.members:
            found = {name: one.host for name, one in self.state.members.items()}
        machines = {host.partition("/")[0] for host in found.values()}
        return dict.fromkeys(found, machines.pop()) if len(machines) == 1 < len(set(found.values())) else found

    @property
    def commit_age(self) -> float | None:
        """Seconds since the last commit; None: there was none."""
        return None if self.seen.last_commit is None else max(0.0, self.now - self.seen.last_commit)

    @property
    def event_age(self) -> float | None:
        """Seconds since the last event; None: there is none."""
        return max(0.0, self.now - float(self.seen.last["t"])) if self.seen.last else None

    @property
    def against_whole(self) -> float | None:
        """Throughput now over that without failures."""
        whole, now = self.seen.whole_seconds, self.seen.seconds
        return None if not whole or not now else whole / now


@dataclass(frozen=True)
class Outlook:
    """`word` and `line` are the verdict, `next_end` is the event that would end the job next, `repair` its remedy;
    either may be empty. `fatal_hosts` are the hosts whose loss ends the job, `copies` the workers of each stage."""

    level: Level
    word: str
    line: str
    next_end: str = ""
    repair: str = ""
    fatal_hosts: Sequence[str] = ()
    copies: Sequence[int] = field(default_factory=tuple)


def judge(facts: Facts) -> Outlook:
    """The verdict."""
    seen = facts.seen
    if facts.over:
        return _ended(facts)
    if facts.told is None and facts.silent:
        old = "" if facts.event_age is None else f"; its last event is {duration(facts.event_age)} old"
        return Outlook(Level.OVER, "UNREACHABLE", f"{facts.silent}{old}",
                       "any failure: without a coordinator nobody decides who goes on",
                       "see whether `recycle run` (or `recycle serve`) still runs on "
                       f"{facts.meeting.host if facts.meeting else 'the first host'}; if not, start the job again from "
                       f"its last checkpoint{_checkpoint(seen)}")
    if not seen.started:
        return _begins(facts.event_age)
    copies, fatal, next_end, single = _exposure(facts)
    pipelines, _ = seen.grid
    age = facts.commit_age
    line = ", ".join([f"{len(facts.hosts)} of {seen.size} workers", *_speed(facts), f"iteration {seen.iteration}",
                      *([] if age is None else [f"last commit {duration(age)} ago"])])

    def outlook(level: Level, word: str, how: str = "", repair: str = _repair(facts)) -> Outlook:
        return Outlook(level, word, f"{how}{line}", next_end, repair, fatal, copies)

    def lasts(since: float | None) -> str:
        return f"for {duration(facts.now - (since or facts.now))}; "

    last = seen.last_commit or float(seen.started.get("t", facts.now))
    if facts.now - last > max(_STALLED, _STALLED_ITERATIONS * (seen.seconds or seen.whole_seconds or 0.0)):
        return outlook(Level.AT_RISK, "STALLED", f"no iteration committed {lasts(last)}",
                       f"recycle stacks {facts.run}   (where all threads stand), then recycle out WORKER")
    if (facts.told or {}).get("phase", "training") != "training" or seen.recovering_since is not None:
        return outlook(Level.DEGRADED, "RECOVERING", lasts(seen.recovering_since))
    if pipelines > 1 and (single or _newly_fatal(facts, fatal)):
        since = seen.degraded_since
        return outlook(Level.AT_RISK, "AT RISK", f"degraded {lasts(since)}" if since else "")
    if seen.out:
        return outlook(Level.DEGRADED, "DEGRADED", lasts(seen.degraded_since))
    return outlook(Level.HEALTHY, "HEALTHY", repair="")


def duration(seconds: float) -> str:
    """A duration for people: 1.4 s, 12 min, 3.2 h, 5 d."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.0f} d"


def _ended(facts: Facts) -> Outlook:
    seen, state = facts.seen, facts.state
    status, message = int(seen.finished.get("status", 1)), str(seen.finished.get("message", ""))
    if not seen.finished and state is not None and state.ended is not None:
        status, message = state.ended[0], state.ended[1]
    moment = float(seen.finished.get("t", facts.now))
    line = f"{duration(facts.now - moment)} ago with status {status}: {message} "
    line += f"({seen.committed} iterations committed, {len(seen.failures)} workers lost)"
    repair = "" if not status else f"start the job again from its last checkpoint{_checkpoint(seen)}"
    word = "ENDED" if not status else "STOPPED" if status in _ASKED else "FAILED"
    return Outlook(Level.OVER, word, line, "", repair)


def _begins(age: float | None) -> Outlook:
    """A job whose workers have not all come yet, with the age of its last event."""
    late = age is not None and age > _FORMING
    text = "the coordinator waits for all workers: they load, build their models and connect"
    return Outlook(Level.AT_RISK if late else Level.HEALTHY, "STARTING", text, "any failure: training has not begun",
                   "recycle logs --failed   (the ends of the logs of those that have failed)" if late else "")


def _exposure(facts: Facts) -> tuple[list[int], list[str], str, list[int]]:
    """Workers of each stage, the hosts whose loss ends the job, this risk in words, and the stages with one worker."""
    seen, hosts = facts.seen, facts.hosts
    _, stages = seen.grid
    workers: list[dict[str, set[str]]] = [{} for _ in range(stages)]
    for name, host in hosts.items():
        worker = Process.parse(name).worker
        workers[worker.stage].setdefault(str(worker), set()).add(host)
    copies = [len(of) for of in workers]
    single = [stage for stage, of in enumerate(workers) if len(of) == 1]
    places = sorted(set(hosts.values()))
    fatal = [host for host in places if any(of and all(host in parts for parts in of.values()) for of in workers)]
    if single:
        stage = single[0]
        ((name, of),) = workers[stage].items()
        more = f" (so is that of stage {', '.join(map(str, single[1:1 + _NAMED]))})" if single[1:] else ""
        return copies, fatal, (f"the loss of {name} on {', '.join(sorted(of))}, the last copy of stage {stage}{more}: "
                               f"{_consequence(facts, stage)}"), single
    if not hosts:
        return copies, fatal, "", single
    tables = () if facts.state is None or facts.state.resume is None else facts.state.resume.shards
    coordinator = (facts.told or {}).get("host", "")
    text = failure_domains.judge(hosts, coordinator, tables=tables).text.removeprefix("warning: ")
    least = min(copies)
    stage = copies.index(least)
    less = f"{least - 1} worker{'s' * (least > 2)} of stage {stage} may go, and no more"
    return copies, fatal, f"{text}; {less}", single


def _consequence(facts: Facts, stage: int) -> str:
    """The consequence of a lost stage."""
    guard = "checkpoint" if facts.state is None else facts.state.job.guard
    kept = (facts.seen.last_copy.get("kept_by") or {}).get(str(stage))
    if guard == "memory" and kept:
        return f"all go back to the copy that {kept} keeps (guard: memory)"
    iteration = facts.seen.checkpoint.get("iteration")
    if guard != "none" and iteration is not None:
        lost = max(0, facts.seen.iteration - iteration)
        return f"all go back to the checkpoint of iteration {iteration}, {lost} iterations are lost"
    return "it ends the job, which has no checkpoint of this run to go back to"


def _newly_fatal(facts: Facts, fatal: Sequence[str]) -> list[str]:
    """Hosts whose loss ends the job now, and did not when it began."""
    if len(set(facts.hosts.values())) < 2:
        return []
    return [host for host in fatal if host not in facts.seen.started.get("fatal_hosts", {})]


def _repair(facts: Facts) -> str:
    """The command that fills empty positions."""
    seen, state, found = facts.seen, facts.state, facts.meeting
    if not seen.out:
        return ""
    waiting = [*(facts.told or {}).get("joiners", ())]
    if waiting:
        return f"nothing: {', '.join(waiting[:_NAMED])} {'is' if len(waiting) == 1 else 'are'} about to join"
    given_up = state.absent.given_up if state is not None else frozenset()
    if seen.started.get("max_restarts") and not seen.out.keys() <= given_up:
        return "nothing yet: the launcher starts them again (max_restarts)"
    if found is None:
        return ""
    if found.name.startswith("slurm-"):
        return f"recycle slurm heal {found.name.removeprefix('slurm-').partition('.')[0]}"
    script = shlex.join(found.command) if found.command else "SCRIPT ARGUMENTS"
    go = f"cd {shlex.quote(found.folder)} && " if found.folder else ""
    return f"{go}recycle run --join {shlex.quote(facts.run)} --nproc {len(seen.out)} {script}"


def _checkpoint(seen: JobHistory) -> str:
    return f" ({seen.checkpoint['place']})" if seen.checkpoint.get("place") else ""


def _speed(facts: Facts) -> list[str]:
    ratio = facts.against_whole
    return [] if ratio is None or not facts.seen.out else [f"{ratio:.2f} of fault-free throughput"]
