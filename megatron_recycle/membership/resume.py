"""The point at which training goes on after a failure: a pure function of the survivors' reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_recycle.membership.names import Process, in_order

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Resume:
    """All survivors bring themselves to `target` (the last iteration stepped; -1: none) and begin `next`.

    `copies` maps a worker that does not hold `target` to a peer that does. `verdict` is what is known of
    `target`'s norm and overflow, None if it must be computed again. `redone` counts actions of `next` that
    were done once already and are lost. `joined` have come in and get everything from their peers.

    With `restored` nobody holds some stages: all go back to their own copies of `target`, `joined` gets, by stage, the
    copy that a worker of another stage keeps, and the scripts of those that are left have come past all that belongs to
    the iteration `regained`. With `checkpoint` all, `joined` too, load that one instead (`State.checkpoint`).
    """

    target: int
    next: int
    attempt: int
    verdict: Mapping[str, Any] | None = None
    copies: Mapping[str, str] = field(default_factory=dict)
    redone: int = 0
    joined: tuple[str, ...] = ()
    restored: Mapping[str, str] = field(default_factory=dict)
    regained: int = -1
    checkpoint: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "next": self.next,
            "attempt": self.attempt,
            "verdict": None if self.verdict is None else dict(self.verdict),
            "copies": dict(self.copies),
            "redone": self.redone,
            "joined": list(self.joined),
            "restored": dict(self.restored),
            "regained": self.regained,
            "checkpoint": None if self.checkpoint is None else dict(self.checkpoint),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Resume:
        names = ("target", "next", "attempt", "verdict", "copies", "redone", "restored", "regained",
                 "checkpoint")
        return cls(**{key: data[key] for key in names}, joined=tuple(data["joined"]))


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
) -> Resume | DeadEnd:
    """The resume point of a generation.

    `members` maps process to incarnation; `reports` has one report for each (see the wire protocol).
    A stage holds what each of its parts holds somewhere.
    `announced` is the (next, attempt) of the last generation that was told to go: an attempt may have been
    announced without any survivor having begun it, and attempts only grow.
    """
    peers = by_stage(stages, members)
    for stage, workers in enumerate(peers):
        if not workers:
            return DeadEnd(f"stage {stage} has no worker left, so nobody holds its parameters. {RESTART}")
    holding = [(stage, names) for stage, workers in enumerate(peers) for names in _by_part(workers)]
    target, lagging = _target([names for _, names in holding], reports)
    if lagging is not None:
        stage, names = holding[lagging]
        return DeadEnd(
            f"stage {stage} holds nothing newer than iteration {_best(names, reports)}, but "
            f"another stage is at {target + 1}: they cannot be brought together. {RESTART}"
        )
    # A step that is not committed can be undone; one that is cannot.
    ahead = next((name for name in members if reports[name].get("committed", reports[name]["stepped"]) > target), None)
    if ahead is not None:
        return DeadEnd(
            f"worker {ahead} has stepped iteration {reports[ahead]['stepped']}, which some stage lost before "
            f"it held it. {RESTART}"
        )
    verdict = _verdict(target, reports)
    if isinstance(verdict, DeadEnd):
        return verdict
    following = target + 1
    again = [reports[name] for name in members if reports[name]["iteration"] == following]
    attempt = 1 + max((report["attempt"] for report in again), default=0)
    if announced is not None and announced[0] == following:
        attempt = max(attempt, announced[1] + 1)
    redone = sum(
        report["actions"] + (report.get("earlier", 0) if report["iteration"] > following else 0)
        for name, report in reports.items()
        if report["iteration"] >= following and not Process.parse(name).part  # a worker's parts do the same
    )
    copies = _copies(target, [names for _, names in holding], reports)
    return Resume(target, following, attempt, verdict, copies, redone)


def _best(workers: Sequence[str], reports: Mapping[str, Report]) -> int:
    return max(reports[name]["holds"] for name in workers)


def _target(peers: Sequence[Sequence[str]], reports: Mapping[str, Report]) -> tuple[int, int | None]:
    """The newest iteration that some member of all peers holds, at most one behind the newest of all;
    beside it the index of peers that are too far behind, if some are."""
    held = [_best(workers, reports) for workers in peers]
    newest = max(held)
    if min(held) == newest:
        return newest, None
    lagging = next((index for index, best in enumerate(held) if best < newest - 1), None)
    return newest - 1, lagging


def _verdict(target: int, reports: Mapping[str, Report]) -> Mapping[str, Any] | DeadEnd | None:
    known = [(name, report["verdict"]) for name, report in reports.items() if report.get("verdict")]
    of_target = [(name, verdict) for name, verdict in known if verdict["iteration"] == target]
    if not of_target:
        return None
    first, verdict = of_target[0]
    for name, other in of_target[1:]:
        if _canonical(other) != _canonical(verdict):
            return DeadEnd(
                f"workers {first} and {name} disagree on the verdict of iteration {target} ({verdict} and "
                f"{other}). Please report this as a bug. {RESTART}"
            )
    return verdict


def _canonical(verdict: Mapping[str, Any]) -> str:
    """Text to compare by: a norm that is not a number differs from itself as a value, but not as text."""
    return json.dumps(verdict, sort_keys=True)


def _copies(target: int, peers: Sequence[Sequence[str]], reports: Mapping[str, Report]) -> dict[str, str]:
    """A source for each member that does not hold `target`; the sending is spread over the holders."""
    copies: dict[str, str] = {}
    for workers in peers:
        holders = [name for name in workers if reports[name]["holds"] >= target]
        lacking = [name for name in workers if reports[name]["holds"] < target]
        copies.update({name: holders[index % len(holders)] for index, name in enumerate(lacking)})
    return copies
