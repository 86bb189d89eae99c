"""Layers that were to be lent, and cannot be: the script has changed them, or a neighbour cannot run them. Pure, like
`machine`.

The planner does not lend them any more, whatever becomes of the job. Where they are lent already the iteration is begun
again in a new generation, whose plan lends nothing; where a plan is on offer that lends them it is taken back, and a
better one is looked for again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from megatron_recycle.membership import failing, job_end
from megatron_recycle.membership.decisions import Decision, Emit, Improve, Step
from megatron_recycle.membership.description import Description, Job
from megatron_recycle.membership.extension import Extension
from megatron_recycle.membership.inputs import Raised, Unlent
from megatron_recycle.membership.lendable import allows, lending, without
from megatron_recycle.membership.state import Member, Phase, State
from megatron_recycle.plan.plan_file import PlanFile

_TRIES = 2
"""How often one member may meet the same stage's: the first time the next plan may have been under way already."""


def declined(state: State, happened: Unlent, now: float) -> Step:
    """A member does not take the plan on offer, which lends what cannot be lent."""
    member, left = state.member(happened.incarnation), _taken_out(state, happened.stage)
    if member is None or left is None:
        return state, ()
    decisions: list[Decision] = [Emit(_event(state, member, happened.stage, happened.why, now))]
    state = left
    lent, offered = state.job.lending, None if state.round.offered is None else state.round.offered.plan
    if offered is not None and not allows(lent, offered):
        state = state.with_(offered=None)
    if state.round.better is not None and not allows(lent, state.round.better[0]):
        state = state.with_(better=None)
    if state.phase is Phase.TRAINING and state.round.offered is None and state.round.plan is not None:
        decisions.append(Improve(state.generation, state.failed, state.round.plan))
    return state, tuple(decisions)


def _taken_out(state: State, stage: int) -> State | None:
    """The state of a job that does not lend this stage's layers; None if it did not before."""
    job = state.job
    left = without(job.lending, stage, job.placement)
    return None if left == job.lending else state.with_(description=replace(job, lending=left))


def _event(state: State, member: Member, stage: int, why: str, now: float) -> dict[str, Any]:
    return {"event": "unlent", "t": now, "generation": state.generation, "worker": member.worker, "stage": stage,
            "why": why}


class LentLayers(Extension):
    """Layers are lent where processes say that they can be."""

    handlers = MappingProxyType({Unlent: declined})

    def described(self, job: Job, told: Mapping[str, Description]) -> Job:
        return replace(job, lending=lending(told, job.grid.stages, job.placement))

    def raised(self, state: State, member: Member, happened: Raised, now: float) -> Step | None:
        """A member has begun an iteration whose plan lends what cannot be lent. None: it has done so before, and what
        has been done about it does not help."""
        fault = happened.fault
        if fault.unlent is None or not fault.whole or state.closing is not None:
            return None
        if state.phase is Phase.RECOVERING and member.worker not in state.round.reports:  # that is over already
            state = _taken_out(state, fault.unlent) or state
            return state, (job_end.answer(member, happened.number),)
        left = _taken_out(state, fault.unlent)
        again = sum((one.incarnation, one.fault.unlent) == (member.incarnation, fault.unlent)
                    for one in state.script.faults)
        if left is None and again > _TRIES:
            return None
        reason = f"layers of stage {fault.unlent} are not lent any more"
        event = _event(state, member, fault.unlent, fault.text, now)
        state, decisions = failing.next_generation(left or state, {}, happened.since, now, reason=reason, more=(event,))
        return state, (*decisions, job_end.answer(member, happened.number))

    def takes(self, state: State, plan: PlanFile) -> bool:
        """Not one that lends what is not lent any more, as its search had begun before that: it would never be adopted,
        and no other one after it."""
        return allows(state.job.lending, plan)
