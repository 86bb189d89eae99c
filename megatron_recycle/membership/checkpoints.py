"""The manifest: the newest checkpoint that is whole. Pure, like `machine`.

The members write a checkpoint together. When all parts are there, one of them says so, and waits: only once that is
noted here is the checkpoint named the newest one. A process that was declared out, and wakes up in the midst of a
checkpoint, is not heard any more: it names nothing.
"""

from __future__ import annotations

from megatron_recycle.membership import records
from megatron_recycle.membership.decisions import Emit, Step, Tell
from megatron_recycle.membership.inputs import Written
from megatron_recycle.membership.state import State


def written(state: State, happened: Written, now: float) -> Step:
    """All members have written their parts. A journal that cannot take it is no reason to do without a checkpoint: a
    coordinator that comes back knows of the one before."""
    member = state.member(happened.incarnation)
    if member is None or happened.generation != state.generation:
        return state, ()
    noted = Tell((member.incarnation,), {"type": "noted", "generation": state.generation, "place": happened.place})
    named = {"iteration": happened.iteration, "place": happened.place}
    checkpoint = {**named, "facts": happened.facts}
    if checkpoint == state.checkpoint:  # told again after a reconnect
        return state, (noted,)
    event = {"event": "checkpoint", "t": now, "generation": state.generation, **named}
    return state.with_(checkpoint=checkpoint), (records.checkpoint(state, checkpoint, event), Emit(event), noted)
