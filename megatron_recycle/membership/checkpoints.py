"""The manifest: the newest whole checkpoints. Pure, like `machine`.

The members write a checkpoint together. When all parts are there, one of them reports it, and waits: the checkpoint is
named the newest one only after it is noted here. A process that was declared out, and wakes up in the midst of a
checkpoint, is ignored: it names nothing.
"""

from __future__ import annotations

from megatron_recycle.membership import failing, records
from megatron_recycle.membership.decisions import Emit, Step, Tell
from megatron_recycle.membership.inputs import Unwritten, Written
from megatron_recycle.membership.protocol import Noted
from megatron_recycle.membership.resume import Checkpoint, noted
from megatron_recycle.membership.state import State


def written(state: State, happened: Written, now: float) -> Step:
    """All members have written their parts. If the journal cannot take the record, the checkpoint is kept all the same;
    a restarted coordinator then knows of the one before."""
    member = state.member(happened.incarnation)
    if member is None or happened.generation != state.generation:
        return state, ()
    goes_on = Tell((member.incarnation,), Noted(state.generation, happened.place))
    checkpoint = Checkpoint(happened.iteration, happened.place, happened.facts)
    if checkpoint in state.checkpoints:  # repeated after a reconnect
        return state, (goes_on,)
    event = {"event": "checkpoint", "t": now, "generation": state.generation,
             "iteration": happened.iteration, "place": happened.place}
    state = state.with_(checkpoints=noted(state.checkpoints, checkpoint))
    return state, (records.checkpoint(state, checkpoint, event), Emit(event), goes_on)


def unwritten(state: State, happened: Unwritten, now: float) -> Step:
    """A member cannot write its part, through no fault of a worker: in a new generation with the same members all agree
    that there is no such checkpoint."""
    member = state.member(happened.incarnation)
    if member is None or happened.generation != state.generation:
        return state, ()
    return failing.next_generation(
        state, {}, now, now, reason=f"{member.worker} cannot write its part of a checkpoint ({happened.why})")
