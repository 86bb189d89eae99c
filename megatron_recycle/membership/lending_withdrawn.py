"""Lending withdrawn: layers that cannot be lent after all, because the script has changed them or a neighbour cannot
run them. Pure, like `machine`.

The planner never lends them again. If they are lent already, the iteration is begun again in a new generation, whose
plan lends nothing. An offered plan that lends them is withdrawn, and the search for a better one is repeated.
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
"""How often one member may meet the same stage's layers: at first the next plan may have been under way already."""


def declined(state: State, happened: Unlent, now: float) -> Step:
    """A member declines the offered plan, which lends layers that cannot be lent."""
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
    """The state without lending of this stage's layers; None if they were not lent before."""
    job = state.job
    left = without(job.lending, stage, job.placement)
    return None if left == job.lending else state.with_(description=replace(job, lending=left))


def _event(state: State, member: Member, stage: int, why: str, now: float) -> dict[str, Any]:
    return {"event": "unlent", "t": now, "generation": state.generation, "worker": member.worker, "stage": stage,
            "why": why}


class LentLayers(Extension):
    """Lending of layers that processes describe as lendable."""

    handlers = MappingProxyType({Unlent: declined})

    def described(self, job: Job, descriptions: Mapping[str, Description]) -> Job:
        return replace(job, lending=lending(descriptions, job.grid.stages, job.placement))

    def raised(self, state: State, member: Member, happened: Raised, now: float) -> Step | None:
        """A member has begun an iteration whose plan lends layers that cannot be lent. None: repeatedly, so that
        withdrawing does not help."""
        fault = happened.fault
        if fault.unlent is None or not fault.whole or state.closing is not None:
            return None
        if state.phase is Phase.RECOVERING and member.worker not in state.round.reports:  # that generation is over
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
        """Reject plans from searches that started before lending was withdrawn: workers would never adopt them, which
        blocks all later offers."""
        return allows(state.job.lending, plan)
