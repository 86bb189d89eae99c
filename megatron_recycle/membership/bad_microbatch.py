"""Bad micro-batches: with `poison: skip` the job goes on without one that fails on every worker. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_recycle.membership import failing, faults, job_end, script_errors
from megatron_recycle.membership.decisions import Step
from megatron_recycle.membership.extension import Extension
from megatron_recycle.membership.fault import Fault
from megatron_recycle.membership.inputs import Raised
from megatron_recycle.membership.state import Member, State

_MOST, _WITHIN = 10, 100
"""Limit of left out micro-batches within so many iterations: more are no accident of the data."""


class BadMicrobatches(Extension):
    """Bad micro-batches are left out, if the job wants that, instead of ending it."""

    def raised(self, state: State, member: Member, happened: Raised, now: float) -> Step | None:
        fault = happened.fault
        if fault.whole and (fault.iteration, fault.microbatch) in state.script.left_out:  # already left out
            return state, (job_end.answer(member, happened.number),)
        fails_in_recovery = fault.recovery and not fault.refused
        if state.closing is not None or fails_in_recovery or (text := faults.fatal(state, member, fault)) is None:
            return None
        lately = tuple(each for each in state.script.left_out if each[0] > (fault.iteration or 0) - _WITHIN)
        if len(lately) >= _MOST:
            why = f"{len(lately)} micro-batches were left out within {_WITHIN} iterations; more are not (poison: skip)."
            return script_errors.end_with(state, member, happened, f"{text} {why}", now)
        if not _possible(state, fault):
            return None
        event = {"event": "skipped", "t": now, "generation": state.generation, "iteration": fault.iteration,
                 "worker": member.worker, "microbatch": fault.microbatch, "error": str(fault)}
        reason = f"micro-batch {fault.microbatch} of iteration {fault.iteration} is left out"
        state = state.with_(left_out=(*lately, (fault.iteration, fault.microbatch)))
        state, decisions = failing.next_generation(state, {}, happened.since, now, reason=reason, more=(event,))
        return state, (*decisions, job_end.answer(member, happened.number))

    def of_go(self, state: State) -> Mapping[str, Any]:
        return {"left_out": state.script.left_out}


def _possible(state: State, fault: Fault) -> bool:
    """Whether the job wants to go on without this fault's micro-batch, and can."""
    return (state.job.poison == "skip" and fault.whole and not fault.refused
            and fault.iteration is not None and fault.microbatch is not None)
