"""Partial checkpoint: the survivors of a job that has lost a stage for good save their state. Pure, like `machine`.

Without that stage there is no whole checkpoint, and no way back was found. So one worker of each other stage writes its
state of the last committed iteration into a file of its own, which is complete or absent. Then the job ends with the
original message and the places of these files. Any error on the way ends the job at once.
"""

from __future__ import annotations

from types import MappingProxyType

from megatron_recycle.membership import guarding, job_end, messages, records
from megatron_recycle.membership.decisions import Await, Decision, Emit, Step, Tell
from megatron_recycle.membership.extension import Extension
from megatron_recycle.membership.inputs import Saved
from megatron_recycle.membership.names import Process, in_order
from megatron_recycle.membership.protocol import Go
from megatron_recycle.membership.resume import Resume, by_stage
from megatron_recycle.membership.state import Closing, Phase, State
from megatron_recycle.plan.plan_file import PlanFile


def _possible(state: State) -> bool:
    """Whether the survivors have something to save, and the job wants it."""
    if guarding.unread(state):  # they have tried to load it
        return False
    wanted = state.job.survivors
    return wanted and state.closing is None and state.progress.committed >= 0 and bool(state.proven) and (
        state.phase in (Phase.RECOVERING, Phase.RETURNING))


def _begin(state: State, now: float) -> Step:
    """All have reported: choose the writers and announce the go. Half loaded state is not saved."""
    assert state.closing is not None
    reports = {name: state.round.reports[name] for name in state.proven if name in state.round.reports}
    whole = {name: report for name, report in reports.items() if not report.guard.midway}
    target = max((report.final for report in whole.values()), default=-1)
    verdict = next((verdict for report in whole.values()
                    if (verdict := report.verdict) is not None and verdict.iteration == target), None)
    writers: dict[tuple[int, int], str] = {}
    for name in in_order(whole):
        report, process = whole[name], Process.parse(name)
        done = report.final == target
        if done or (verdict is not None and report.holds >= target):
            writers.setdefault((process.worker.stage, process.part or 0), name)
    if not writers:
        return job_end.end(state, 1, "none of those that are left holds a whole iteration", now)
    attempt = 1 + max(report.attempt for report in reports.values())
    resume = Resume(target, target + 1, attempt, verdict)
    members = {name: state.proven[name].incarnation for name in in_order(reports)}
    go = Go(state.generation, attempt, members, PlanFile(), resume, messages.group_prefix(state.generation, members),
            closing=state.closing.message, writers=tuple(sorted(writers.values())), missing=state.closing.missing)
    event = {"event": "surviving", "t": now, "generation": state.generation, "iteration": target,
             "missing": list(state.closing.missing), "writers": sorted(writers.values())}
    record = records.went(state, resume, None, [event])
    state = state.with_(phase=Phase.TRAINING, go=go, resume=resume)
    decisions: tuple[Decision, ...] = (
        record, Tell(tuple(members.values()), go), Emit(event), *job_end.limit(state, now))
    return state, decisions


def _saved(state: State, happened: Saved, now: float) -> Step:
    """A member has reported the place of its part, of this or of a last checkpoint; the job ends when all have."""
    if state.closing is None or not state.closing.missing:
        return job_end.saved(state, happened, now)
    state, ending = job_end.noted(state, happened)
    if ending is None or state.resume is None or not ending.saved.keys() >= state.proven.keys():
        return state, ()
    resume, saved = state.resume, [(name, *ending.saved[name]) for name in in_order(ending.saved)]
    errors = {name: error for name, _, error in saved if error}
    places = {str(Process.parse(name).worker.stage): place for name, place, _ in saved if place}
    missing = ", ".join(map(str, ending.missing))
    if not places:
        return job_end.end(state, 1, next(iter(errors.values()), "none of its writers has written anything"), now)
    folders = sorted({place.rpartition("/")[0] for place in places.values()})
    stages = ", ".join(sorted(places, key=int))
    text = (f"{job_end.sentence(ending.message)} What the survivors hold of iteration {resume.target} (stage {stages}; "
            f"stage {missing} is missing) is in {' and '.join(folders)}: no checkpoint to start from, but weights and "
            "optimizer state that can be taken from there (docs/failures.md).")
    if errors:
        text += f" Not written: {'; '.join(f'{name}: {error}' for name, error in errors.items())}."
    event = {"event": "saved", "t": now, "generation": state.generation, "iteration": resume.target,
             "place": folders[0], "missing": list(ending.missing), "places": places}
    state, over = job_end.end(state.with_(closing=None), ending.status, text, now, ending.again)
    return state, (Emit(event), *over)


def _missing(state: State) -> list[int]:
    return [stage for stage, names in enumerate(by_stage(state.stages, state.proven)) if not names]


def _reported(state: State) -> bool:
    return all(name in state.round.reports for name in state.proven)


class Survivors(Extension):
    """Survivors of a lost stage save their state before the job ends."""

    handlers = MappingProxyType({Saved: _saved})

    def instead_of_end(self, state: State, text: str, now: float) -> Step | None:
        if not _possible(state):
            return None
        if state.phase is Phase.RETURNING:  # the members that come back lack this generation's go, and begin another
            return state, ()
        state = state.with_(closing=Closing(text, 1, True, missing=tuple(_missing(state))))
        return _begin(state, now) if _reported(state) else (state, (Await(state.generation),))

    def after(self, before: State, state: State, decisions: tuple[Decision, ...], now: float) -> Step:
        """The last survivor has reported."""
        due = state.phase is Phase.RECOVERING and state.closing is not None and state.closing.missing
        if not due or not _reported(state):
            return state, decisions
        state, more = _begin(state, now)
        return state, (*decisions, *more)
