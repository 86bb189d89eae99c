"""Guards: copies of a last copy on another stage's worker (`guard: memory`), and the way back if a stage is lost. Pure,
like `machine`.

While a stage has one worker, every worker copies its own state between two iterations now and then, and another stage's
worker takes the copy of that stage too. A lost stage gets a new process (`stage_restore`) with its keeper's state; all
others go back to their own copies of the same iteration. If the newest whole checkpoint of this run is newer than all
copies, all load the checkpoint instead (`guard: checkpoint`). The same happens where an optimizer shard is lost,
without a new process: the remaining workers of its stage load all shards between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_recycle.membership.extension import Extension
from megatron_recycle.membership.failure_domains import exposed, exposed_shards
from megatron_recycle.membership.names import Process, in_order
from megatron_recycle.membership.report import Report
from megatron_recycle.membership.resume import RESTART, Checkpoint, DeadEnd, Resume, parts_of, single
from megatron_recycle.membership.shards import Shard, anew, copies_of, lost, told
from megatron_recycle.membership.sole_holders import last_known
from megatron_recycle.membership.state import Event, State
from megatron_recycle.plan.grid import Worker


@dataclass(frozen=True)
class Source:
    """The way back: the state after ``iteration``. `keepers` have, by stage, that of a lost stage, or the
    ``checkpoint`` has all. The scripts have asked for all iterations up to the one after ``regained``."""

    iteration: int
    regained: int
    keepers: Mapping[int, str] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None


def wanted(state: State) -> bool:
    """Whether the job keeps copies of last copies."""
    return state.job.guard == "memory"


def keepers(state: State) -> dict[str, str]:
    """By stage with one worker, the keeper of its copy: a worker of another stage, on another host if possible, with
    the fewest copies to keep."""
    if not wanted(state):
        return {}
    hosts: dict[Worker, str] = {}
    for name in in_order(state.members):
        hosts.setdefault(Process.parse(name).worker, state.members[name].host)
    stages = Counter(worker.stage for worker in hosts)
    kept: Counter[Worker] = Counter()
    found: dict[str, str] = {}
    for last in (worker for worker in hosts if stages[worker.stage] == 1):
        others = [worker for worker in hosts if worker.stage != last.stage]
        if others:
            keeper = min(others, key=lambda one: (hosts[one] == hosts[last], kept[one], one))
            kept[keeper] += 1
            found[str(last.stage)] = str(keeper)
    return found


def _host(state: State, worker: str) -> str:
    """This worker's host, for messages."""
    return next(member.host for name, member in state.members.items() if str(Process.parse(name).worker) == worker)


def empty_stages(state: State, names: Sequence[str] | None = None) -> list[int]:
    """Stages without a process among ``names`` (default: the members, with or without the stage's state)."""
    present = {Process.parse(name).worker.stage for name in (state.members if names is None else names)}
    return [stage for stage in range(state.stages) if stage not in present]


def source(reports: Mapping[str, Report], lost: Sequence[int], newest: Checkpoint | None = None,
           copies: bool = True) -> Source | str:
    """The newest state that all of a job can go back to, by the survivors' reports; or the reason why there is none.

    Args:
        lost: stages without a holder.
        newest: the newest checkpoint of this run that can be loaded.
        copies: whether workers keep copies.
    """
    kept, loaded = _copies(reports, lost), _loadable(reports, newest)
    found = [one for one in (kept, loaded) if isinstance(one, tuple)]
    if not found:
        return "; ".join(str(one) for one in (kept if copies else "", loaded) if one)
    iteration, keepers = max(found, key=lambda one: one[0])
    asked = max(report.last_asked for report in reports.values())
    return Source(iteration, asked - 1, keepers, None if keepers else newest)


def _loadable(reports: Mapping[str, Report], checkpoint: Checkpoint | None) -> tuple[int, dict[int, str]] | str:
    """The checkpoint's iteration, if all can go on from it; or the reason why not."""
    if checkpoint is None:
        return ""
    for name, report in reports.items():
        back = report.guard.back
        if back is None or report.guard.read > checkpoint.iteration:
            return f"what {name} has read of its data iterator since the last checkpoint cannot be read again"
        if back > checkpoint.iteration:
            return f"on {name} the script has changed something since the last checkpoint, before iteration {back}"
    return checkpoint.iteration, {}


def _copies(reports: Mapping[str, Report], lost: Sequence[int]) -> tuple[int, dict[int, str]] | str:
    """The newest iteration that all have copies of, and the keepers of the lost stages; or the reason why there is
    none. A worker with several parts keeps what all its parts keep."""
    own = [set(report.guard.own) for report in reports.values()]
    common = set.intersection(*own) if own else set()
    found: dict[int, dict[int, str]] = {}  # iteration -> stage -> keeper
    for worker in dict.fromkeys(str(Process.parse(name).worker) for name in in_order(reports)):
        parts = [report for name, report in reports.items() if str(Process.parse(name).worker) == worker]
        for stage in lost:
            of_parts: list[set[int]] = [set(report.guard.of.get(stage, ())) for report in parts]
            for iteration in common.intersection(*of_parts):
                found.setdefault(iteration, {}).setdefault(stage, worker)
    whole = [iteration for iteration, by in found.items() if len(by) == len(lost)]
    if not whole:
        stages = ", ".join(map(str, lost))
        return f"nobody who is left keeps a copy of stage {stages} that all others can go back to"
    return max(whole), found[max(whole)]


def possible(state: State) -> bool:
    """Whether a lost stage may come back."""
    return (wanted(state) or checkpoint(state) is not None) and state.closing is None and bool(state.members)


def checkpoint(state: State) -> Checkpoint | None:
    """The checkpoint that a job with a lost stage may go back to."""
    found = {one.place: one for one in state.checkpoints}.values()  # an earlier checkpoint may have had the same place
    usable = [one for one in found if one.facts is not None and one.unread is None]
    return max(usable, key=lambda one: one.iteration, default=None)


def unread(state: State) -> str:
    """The reason why checkpoints of this run are not used, as a sentence."""
    return "".join(f" The checkpoint in {one.place} cannot be read ({one.unread})." for one in state.checkpoints
                   if one.unread is not None)


def not_asked_for(state: State) -> str:
    """A sentence for `guard: none`: lost stages are not brought back."""
    none = state.job.guard == "none"
    return " It is not brought back from a checkpoint of this run, since guard is none." if none else ""


def goes_back(state: State) -> bool:
    """Whether all must go back, now that they have reported: a stage or a shard is lost; or they were on their way
    back, and may not all have arrived."""
    return bool(empty_stages(state, [*state.proven]) or lost_shards(state)
                or any(report.guard.midway for report in state.round.reports.values()))


def lost_shards(state: State) -> list[Shard]:
    """The lost shards of stages that have workers."""
    return lost(parts_of(state.stages, state.proven), state.round.reports)


def resume(state: State, closed: Sequence[int] = ()) -> Resume | DeadEnd:
    """The resume point from a copy or a checkpoint, with the new processes of lost stages, if any. With ``closed``
    stages from a checkpoint: they would have to repeat an iteration that scripts have left."""
    stages, shards = empty_stages(state, [*state.proven]), lost_shards(state)
    before = () if state.resume is None else state.resume.shards
    copies = wanted(state) and not closed
    found = (source(state.round.reports, stages, checkpoint(state), copies) if state.closing is None else
             "the job ends")
    if isinstance(found, str):
        if closed:
            return DeadEnd(f"{found or 'there is no checkpoint of this run to go back to'}.{unread(state)}")
        cut = told(shards, last_known(state))
        return DeadEnd(_without_source(stages, cut, state.progress.committed, found, unread(state)))
    attempts = [report.attempt for report in state.round.reports.values()]
    announced = 0 if state.resume is None else state.resume.attempt
    gone = sorted({*stages, *closed, *(shard.stage for shard in shards)}) or (
        [] if state.resume is None else [*map(int, state.resume.restored)])
    restored = {str(stage): found.keepers.get(stage, "checkpoint") for stage in gone}
    counts = {(table.stage, table.part): len(table.holders) for table in before}
    tables = anew({name: member.host for name, member in state.members.items()}, counts,
                  copies_of(state.round.reports.values()))
    return Resume(found.iteration, found.iteration + 1, 1 + max([announced, *attempts]),
                  joined=tuple(in_order(state.arrivals.unproven)), regained=found.regained, restored=restored,
                  checkpoint=found.checkpoint, shards=tables)


def _without_source(stages: Sequence[int], shards: str, committed: int, why: str, unread: str) -> str:
    if stages:
        return (f"stage {', '.join(map(str, stages))} has no worker left and cannot come back: "
                f"{'; '.join(one for one in (why, shards) if one)}. {RESTART}")
    lost = f"{shards}: nobody who is left has it" if shards else "a failure has cut off the way back to a checkpoint"
    advice = " A larger state_copies keeps each shard more often" if shards else ""
    return (f"{lost}, and {why or 'there is no checkpoint of this run to go back to'}; last committed iteration: "
            f"{committed if committed >= 0 else 'none'}.{unread} {RESTART}{advice}")


class LastCopies(Extension):
    """Guards of last copies, if the job wants them, and warnings about last copies."""

    def of_go(self, state: State) -> Mapping[str, Any]:
        return {"keepers": keepers(state)}

    def went(self, state: State, resume: Resume, now: float) -> tuple[State, Sequence[Event]]:
        return state, (*_last_copies(state, now), *_last_hosts(state, resume, now))


def _last_copies(state: State, now: float) -> tuple[dict[str, Any], ...]:
    """The event of stages that have come down to one worker with this generation. Only a warning: with `guard` they
    come back, with `moves` a worker may move in, and `--job-restarts` starts the script again."""
    before = [] if state.go is None else list(state.go.members)
    found = {str(stage): worker for stage, worker in single([*state.members]).items() if stage not in single(before)}
    if not before or not found:
        return ()
    kept, newest = keepers(state), checkpoint(state)
    event = {"event": "last_copy", "t": now, "generation": state.generation, "stages": found,
             "checkpoint": None if newest is None else newest.iteration,
             "hosts": {stage: _host(state, worker) for stage, worker in found.items()},
             "kept_by": {stage: kept[stage] for stage in found if stage in kept} or None}
    return (event,)


def _last_hosts(state: State, resume: Resume, now: float) -> tuple[dict[str, Any], ...]:
    """The event of hosts that with this generation have come to hold all workers of a stage, or all copies of a shard
    of its optimizer's state."""
    if state.go is None:
        return ()
    before = {name: state.known[incarnation].host for name, incarnation in state.go.members.items()
              if incarnation in state.known}
    hosts = {name: member.host for name, member in state.members.items()}
    found = exposed(before, hosts)
    cut = exposed_shards(before, () if state.resume is None else state.resume.shards, hosts, resume.shards)
    event = {"event": "last_host", "t": now, "generation": state.generation, "hosts": found}
    return ({**event, **({"shards": cut} if cut else {})},) if found or cut else ()
