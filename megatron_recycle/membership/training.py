"""Training between two membership changes, as the coordinator follows it: workers that have resumed, committed
iterations, the offered plan in use.

A part of the membership machine. Pure, like `machine`.
"""

from __future__ import annotations

from typing import Any

from megatron_recycle.membership import commands, records
from megatron_recycle.membership.decisions import Decision, Emit, Improve, Step, Tell
from megatron_recycle.membership.extension import IN_FORCE
from megatron_recycle.membership.inputs import Adopted, Committed, Improved, Resumed
from megatron_recycle.membership.names import in_order, workers_of
from megatron_recycle.membership.persistent_map import put
from megatron_recycle.membership.protocol import Offer
from megatron_recycle.membership.resume import Resume
from megatron_recycle.membership.state import Phase, State
from megatron_recycle.plan.plan_file import PlanFile


def begin(state: State) -> State:
    """The state at a go. Generation 1's first target (a checkpoint) was not committed in this run."""
    if state.generation > 1 or state.resume is None:
        return state
    target = state.resume.target
    return state.with_(committed=target, committed_by=dict.fromkeys(state.members, target), behind=0)


def planned_event(state: State, plan: PlanFile, plan_ms: float, now: float) -> dict[str, Any]:
    """The event of a plan, without its actions."""
    return {
        "event": "planned",
        "t": now,
        "generation": state.generation,
        "ms": state.ms(now),
        "plan_ms": round(plan_ms, 3),
        "source": plan.source,
        "digest": plan.digest,
        "period": plan.period,
        "makespan": plan.makespan,
        "lower_bound": plan.lower_bound,
        **({"lending": plan.about_lending} if plan.about_lending else {}),
    }


def reconciled_event(state: State, resume: Resume, now: float) -> dict[str, Any]:
    return {
        "event": "reconciled",
        "t": now,
        "generation": state.generation,
        "attempt": resume.attempt,
        "iteration": resume.next,
        "ms": state.ms(now),
        "target": resume.target,
        "copies": dict(resume.copies),
        "redone": resume.redone,
        "joined": list(resume.joined) or None,
    }


def resumed(state: State, happened: Resumed, now: float) -> Step:
    """A member has begun its first action. With the last one the recovery is over and the search for a better plan
    begins: not before, because it would take processor time from the recovery."""
    member = state.member(happened.incarnation)
    current = state.in_force and happened.generation == state.generation
    if member is None or not current or member.worker in state.round.resumed:
        return state, ()
    return all_resumed(state.with_(resumed=put(state.round.resumed, member.worker, happened.t)), now)


def all_resumed(state: State, now: float) -> Step:
    """The end of the recovery, once the last member has begun and the coordinator knows where all members are."""
    resume, plan = state.resume, state.round.plan
    if resume is None or state.phase is not Phase.TRAINING or len(state.round.resumed) < len(state.members):
        return state, ()
    last = max(state.round.resumed.values())
    decisions: list[Decision] = []
    if state.since is not None:
        event = {
            "event": "resumed",
            "t": last,
            "generation": state.generation,
            "attempt": resume.attempt,
            "iteration": resume.next,
            "ms": state.ms(last),
            "survivors": len(workers_of(state.members)),
        }
        decisions += [records.resumed(state, event), Emit(event)]
    reached = {name: max(state.progress.committed_by.get(name, -1), resume.target) for name in state.members}
    state, more = committed_by_all(state.with_(since=None, committed_by=reached), now)
    # Without a plan (possible after a coordinator restart) there is no search for a better one.
    search = () if plan is None else (Improve(state.generation, state.failed, plan),)
    sought = (one for each in IN_FORCE for one in each.seek(state))
    return state, (*decisions, *more, *search, *sought)


def committed(state: State, happened: Committed, now: float) -> Step:
    """A member has committed an iteration. Only a way back undoes that, so it counts in later generations, too."""
    member = state.member(happened.incarnation)
    if member is None or happened.generation < state.progress.back:
        return state, ()
    if happened.iteration <= state.progress.committed_by.get(member.worker, -1):
        return state, ()
    losses = state.progress.losses
    if happened.loss is not None and happened.iteration > state.progress.committed:
        of_iteration = put(losses.get(happened.iteration, {}), member.worker, happened.loss)
        losses = {**losses, happened.iteration: of_iteration}
    behind = state.progress.behind - (state.progress.committed_by.get(member.worker, -1) <= state.progress.committed)
    by = put(state.progress.committed_by, member.worker, happened.iteration)
    state = state.with_(committed_by=by, losses=losses, behind=behind)
    return (state, ()) if behind > 0 else committed_by_all(state, now)


def committed_by_all(state: State, now: float) -> Step:
    """Emit the event of each iteration that the slowest member has now reached."""
    reached = [state.progress.committed_by.get(name, -1) for name in state.members]
    slowest = min(reached, default=-1)
    state = state.with_(behind=sum(iteration <= max(slowest, state.progress.committed) for iteration in reached))
    events = [Emit(_committed_event(state, k, now)) for k in range(state.progress.committed + 1, slowest + 1)]
    if not events:
        return state, ()
    losses = {iteration: by for iteration, by in state.progress.losses.items() if iteration > slowest}
    state = state.with_(committed=slowest, losses=losses, mended=0, restores=0, retries=0)
    return state, (*events, records.committed(state), commands.progress())


def _committed_event(state: State, iteration: int, now: float) -> dict[str, Any]:
    by = state.progress.losses.get(iteration, {})
    values = [by[name] for name in in_order(by)]
    event: dict[str, Any] = {"event": "committed", "t": now, "generation": state.generation}
    event["iteration"] = iteration
    if values:
        event["loss"] = values[0]
        if any(repr(value) != repr(values[0]) for value in values):
            event["losses"] = dict(by)
    return event


def improved(state: State, happened: Improved, now: float) -> Step:
    """A better plan is offered; the workers adopt it together at a boundary. It is rejected while a switch is on offer,
    which begins with the best known plan anyway, and waits while another plan is being adopted."""
    if state.phase is not Phase.TRAINING or happened.generation != state.generation or state.round.switch:
        return state, ()
    if not all(each.takes(state, happened.plan) for each in IN_FORCE):
        return state, ()
    if state.round.offered is not None:
        return state.with_(better=(happened.plan, happened.plan_ms)), ()
    return _offer(state, happened.plan, happened.plan_ms, now)


def _offer(state: State, plan: PlanFile, plan_ms: float, now: float) -> Step:
    number = state.offers + 1
    offer = Offer(state.generation, number, plan)
    event = planned_event(state, plan, plan_ms, now)
    state = state.with_(offers=number, adopted={}, offered=offer, better=None)
    return state, (records.offer(state, number), Emit(event), Tell(tuple(state.incarnations().values()), offer))


def adopted(state: State, happened: Adopted, now: float) -> Step:
    """A member uses the offered plan. Once all do, one event; then the next offer, if a plan was found meanwhile."""
    member = state.member(happened.incarnation)
    if member is None or not state.in_force or happened.generation != state.generation:
        return state, ()
    if not _counts(state, happened.digest) or state.round.adopted.get(member.worker) == happened.digest:
        return state, ()
    by = put(state.round.adopted, member.worker, happened.digest)
    state = state.with_(adopted=by)
    if len(by) < len(state.members) or len(set(by.values())) > 1:
        return state, ()
    event = {
        "event": "adopted",
        "t": now,
        "generation": state.generation,
        "iteration": happened.iteration,
        "digest": happened.digest,
    }
    if state.round.offered is not None:
        state = state.with_(plan=state.round.offered.plan, offered=None)
    record = records.adopted(state, happened.digest, event)
    better = state.round.better
    state, more = (state, ()) if better is None or state.round.switch else _offer(state, *better, now)
    return state, (record, Emit(event), *more)


def _counts(state: State, digest: str) -> bool:
    """Whether an adoption is of the offered plan, or, with none on offer, of an earlier coordinator's."""
    latest = state.latest
    return latest is None or (digest == latest.digest) is (state.round.offered is not None)
