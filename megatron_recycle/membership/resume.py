"""The resume point after a failure: a pure function of the survivors' reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from msgspec import field

from megatron_recycle.membership.names import Process, in_order
from megatron_recycle.membership.report import Report
from megatron_recycle.membership.shards import ShardTable, count_of, lost, of_report, tables, told
from megatron_recycle.membership.verdict import Verdict
from megatron_recycle.plan.value import Value


class Checkpoint(Value, frozen=True, omit_defaults=True):
    """A whole checkpoint at ``place``, of the state after ``iteration``. ``facts`` are needed besides to go back to it;
    None: going back is impossible. ``unread`` is the reason why it turned out to be unreadable."""

    iteration: int
    place: str
    facts: Mapping[str, Any] | None
    unread: str | None = None


CHECKPOINTS = 3
"""How many of its latest checkpoints a job may go back to."""


def noted(checkpoints: Sequence[Checkpoint], one: Checkpoint) -> tuple[Checkpoint, ...]:
    """``checkpoints`` with one more, or, if it is ``unread``, with that entry updated. Workers keep enough state to go
    back to each of these."""
    if one.unread is not None:
        return tuple(one if known.place == one.place else known for known in checkpoints)
    return (*checkpoints, one)[-CHECKPOINTS:]


class Resume(Value, frozen=True):
    """All survivors bring themselves to `target` (the last iteration stepped; -1: none) and begin `next`.

    `copies` maps a worker that does not hold `target` to a peer that does. `verdict` is that on `target`, None if it
    must be computed again. `redone` counts actions of `next` that were done once already and are lost. `joined` have
    come in and get all state from their peers.

    With `restored` some stages, or shards of theirs, are lost: all workers go back to their own copies of `target`. By
    stage, `joined` gets the copy that a worker of another stage keeps. The survivors' scripts have passed everything of
    the iteration `regained`. With `checkpoint` all workers, `joined` included, load that instead (one of
    `State.checkpoints`), and of the shards their own by `shards`.

    Stages that are `closed` hold `next` already, and their scripts may have left it: they stay where they are, and only
    send again the messages that others still have to read (`runtime.loop`).

    Where the optimizer's state is cut into shards, `slices` are (worker that lacks `target`, worker that holds it,
    shard; -1: the numbers that belong to the gradient), and `shards` are the old and the new holders.
    """

    target: int
    next: int
    attempt: int
    verdict: Verdict | None = None
    copies: Mapping[str, str] = field(default_factory=dict)
    redone: int = 0
    joined: tuple[str, ...] = ()
    restored: Mapping[str, str] = field(default_factory=dict)
    regained: int = -1
    checkpoint: Checkpoint | None = None
    slices: tuple[tuple[str, str, int], ...] = ()
    shards: tuple[ShardTable, ...] = ()
    closed: tuple[int, ...] = ()


@dataclass(frozen=True)
class DeadEnd:
    """Training cannot go on; `message` names the stage and says what to do."""

    message: str


RESTART = "Restart the job from its last checkpoint with the same command."


def by_stage(stages: int, members: Iterable[str]) -> list[list[str]]:
    """The processes of each stage, in worker order."""
    found: list[list[str]] = [[] for _ in range(stages)]
    for name in in_order(members):
        found[Process.parse(name).worker.stage].append(name)
    return found


def single(names: Sequence[str]) -> dict[int, str]:
    """Stages with one worker, and that worker."""
    workers = {Process.parse(name).worker for name in names}
    counts = Counter(worker.stage for worker in workers)
    return {worker.stage: str(worker) for worker in sorted(workers) if counts[worker.stage] == 1}


def parts_of(stages: int, members: Iterable[str]) -> list[list[str]]:
    """The processes that hold the same parameters, stage by stage and part by part."""
    return [names for workers in by_stage(stages, members) for names in _by_part(workers)]


def _by_part(names: Sequence[str]) -> list[list[str]]:
    """A stage's processes that hold the same parameters: the same part of each worker."""
    parts = sorted({Process.parse(name).part or 0 for name in names})
    return [[name for name in names if (Process.parse(name).part or 0) == part] for part in parts]


def decide(
    stages: int,
    members: Mapping[str, str],
    reports: Mapping[str, Report],
    *,
    announced: tuple[int, int] | None = None,
    joined: Sequence[str] = (),
    hosts: Mapping[str, str] = MappingProxyType({}),
    leaving: Sequence[str] = (),
) -> Resume | DeadEnd:
    """The resume point of a generation.

    `members` maps process to incarnation; `reports` has one report for each (see the wire protocol). A stage holds an
    iteration if some process holds it of each of its parts and shards; every shard has a holder. `joined` come in,
    `hosts` are the processes' hosts, and members that are `leaving` hand their shards over. `announced` is the (next,
    attempt) of the last go: an attempt may have been announced without any survivor having begun it, and attempts only
    grow.
    """
    peers = by_stage(stages, members)
    for stage, workers in enumerate(peers):
        if not workers:
            return DeadEnd(f"stage {stage} has no worker left, so nobody holds its parameters. {RESTART}")
    if gone := lost(parts_of(stages, members), reports):
        return DeadEnd(f"{told(gone)}: nobody who is left has it. {RESTART}")
    holding = [held for stage, workers in enumerate(peers) for names in _by_part(workers)
               for held in _held(stage, names, reports)]
    target, lagging = _target(holding)
    if lagging is not None:
        return DeadEnd(
            f"stage {lagging.stage} holds nothing newer than iteration {lagging.best}, but "
            f"another stage is at {target + 1}: they cannot be brought together. {RESTART}"
        )
    # An uncommitted step can be undone; a committed one cannot.
    ahead = next((name for name in members if reports[name].final > target), None)
    if ahead is not None:
        return DeadEnd(
            f"worker {ahead} has stepped iteration {reports[ahead].stepped}, which some stage lost before "
            f"it held it. {RESTART}"
        )
    verdict = _verdict(target, reports)
    if isinstance(verdict, DeadEnd):
        return verdict
    following = target + 1
    again = [reports[name] for name in members if reports[name].iteration == following]
    attempt = 1 + max((report.attempt for report in again), default=0)
    if announced is not None and announced[0] == following:
        attempt = max(attempt, announced[1] + 1)
    redone = sum(
        report.actions + (report.earlier if report.iteration > following else 0)
        for name, report in reports.items()
        if report.iteration >= following and not Process.parse(name).part  # a worker's parts do the same
    )
    copies = {to: source for held in holding if held.shard < 0 for to, source in held.copies(target)}
    slices = [(to, source, held.shard) for held in holding if held.shard >= 0 for to, source in held.copies(target)]
    parts = parts_of(stages, members)
    slices += _numbers(target, parts, reports)
    found = [each for report in reports.values() if (each := report.closed_in(following)) is not None]
    closed = tuple(sorted({stage for each in found for stage in each.stages if 0 <= stage < stages}))
    return Resume(target, following, attempt, verdict, copies, redone, slices=tuple(slices),
                  shards=tables(parts, reports, joined, hosts, leaving), closed=closed)


@dataclass(frozen=True)
class _Held:
    """A part of a stage, or a shard of it, and by process that has it the last iteration whose gradient it holds of
    it."""

    stage: int
    part: int
    shard: int
    by: Mapping[str, int]

    @property
    def best(self) -> int:
        return max(self.by.values())

    def copies(self, target: int) -> list[tuple[str, str]]:
        """A source for each process that does not hold ``target``; the sending is spread over the holders."""
        holders = [name for name, holds in self.by.items() if holds >= target]
        lacking = [name for name, holds in self.by.items() if holds < target]
        return [(name, holders[index % len(holders)]) for index, name in enumerate(lacking)]


def _held(stage: int, names: Sequence[str], reports: Mapping[str, Report]) -> list[_Held]:
    """The holdings of these processes of one part of ``stage``, by shard where there are shards."""
    part, count = Process.parse(names[0]).part or 0, count_of(names, reports)
    if not count:
        return [_Held(stage, part, -1, {name: reports[name].holds for name in names})]
    have = {name: of_report(reports[name]) for name in names}
    return [_Held(stage, part, shard, {name: have[name][shard] for name in names if shard in have[name]})
            for shard in range(count)]


def _numbers(target: int, parts: Sequence[Sequence[str]],
             reports: Mapping[str, Report]) -> list[tuple[str, str, int]]:
    """Where there are shards: senders of the numbers of ``target``'s gradient to the processes that lack it."""
    found = []
    for names in (names for names in parts if count_of(names, reports)):
        holder = next(name for name in names if reports[name].holds >= target)
        found += [(name, holder, -1) for name in names if reports[name].holds < target]
    return found


def _target(holding: Sequence[_Held]) -> tuple[int, _Held | None]:
    """The newest iteration that is held completely, at most one behind the newest of all; and the first holding that is
    too far behind, if any."""
    best = [held.best for held in holding]
    newest = max(best)
    if min(best) == newest:
        return newest, None
    return newest - 1, next((held for held in holding if held.best < newest - 1), None)


def _verdict(target: int, reports: Mapping[str, Report]) -> Verdict | DeadEnd | None:
    known = [(name, report.verdict) for name, report in reports.items() if report.verdict is not None]
    of_target = [(name, verdict) for name, verdict in known if verdict.iteration == target]
    if not of_target:
        return None
    first, verdict = of_target[0]
    for name, other in of_target[1:]:
        if repr(other) != repr(verdict):  # a NaN norm differs from itself as a value
            return DeadEnd(
                f"workers {first} and {name} disagree on the verdict of iteration {target} ({verdict} and "
                f"{other}). Please report this as a bug. {RESTART}"
            )
    return verdict
