"""The manifest: the newest checkpoints that are whole. Pure, like `machine`.

The members write a checkpoint together. When all parts are there, one of them says so, and waits: only once that is
noted here is the checkpoint named the newest one. A process that was declared out, and wakes up in the midst of a
checkpoint, is not heard any more: it names nothing. One that somebody cannot read when a job goes back to it (a file is
cut off, or gone) is not gone back to any more: then it is the one before.
"""

from __future__ import annotations

from types import MappingProxyType

from msgspec.structs import replace

from megatron_recycle.membership import failing, guarding, records
from megatron_recycle.membership.decisions import Emit, Step, Tell
from megatron_recycle.membership.extension import Extension
from megatron_recycle.membership.inputs import Unreadable, Unwritten, Written
from megatron_recycle.membership.protocol import Noted
from megatron_recycle.membership.resume import Checkpoint
from megatron_recycle.membership.state import State


def written(state: State, happened: Written, now: float) -> Step:
    """All members have written their parts. A journal that cannot take it is no reason to do without a checkpoint: a
    coordinator that comes back knows of the one before."""
    member = state.member(happened.incarnation)
    if member is None or happened.generation != state.generation:
        return state, ()
    noted = Tell((member.incarnation,), Noted(state.generation, happened.place))
    checkpoint = Checkpoint(happened.iteration, happened.place, happened.facts)
    if checkpoint in state.checkpoints[-1:]:  # told again after a reconnect
        return state, (noted,)
    event = {"event": "checkpoint", "t": now, "generation": state.generation,
             "iteration": happened.iteration, "place": happened.place}
    state = state.with_(checkpoints=guarding.noted(state.checkpoints, checkpoint))
    return state, (records.checkpoint(state, checkpoint, event), Emit(event), noted)


def unreadable(state: State, happened: Unreadable, now: float) -> Step:
    """A member cannot read the checkpoint that all go back to. The first word counts: the generation is over then."""
    member = state.member(happened.incarnation)
    known = next((one for one in reversed(state.checkpoints) if one.place == happened.place), None)
    if member is None or known is None or happened.generation != state.generation:
        return state, ()
    known = replace(known, unread=f"{happened.why} on {member.worker}")
    event = {"event": "unreadable", "t": now, "generation": state.generation, "worker": member.worker,
             "iteration": known.iteration, "place": happened.place, "error": happened.why}
    state = state.with_(checkpoints=guarding.noted(state.checkpoints, known))
    record = records.checkpoint(state, known, event)
    state, decisions = failing.next_generation(
        state, {}, now, now, reason=f"the checkpoint in {happened.place} cannot be read ({known.unread})")
    return state, (record, Emit(event), *decisions)


def unwritten(state: State, happened: Unwritten, now: float) -> Step:
    """A member cannot write its part, and nobody is at fault: in a new generation with the same members all agree that
    there is no such checkpoint."""
    member = state.member(happened.incarnation)
    if member is None or happened.generation != state.generation:
        return state, ()
    return failing.next_generation(
        state, {}, now, now, reason=f"{member.worker} cannot write its part of a checkpoint ({happened.why})")


class Checkpoints(Extension):
    """The job knows which checkpoints are whole."""

    handlers = MappingProxyType({Written: written, Unreadable: unreadable, Unwritten: unwritten})
