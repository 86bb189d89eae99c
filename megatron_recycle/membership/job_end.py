"""The end of a job: at once, or after one last generation, which does not train. Pure, like `machine`.

A last generation is decided, recorded and announced like any other. Its members bring themselves to the last committed
iteration, each writes its part of a checkpoint and reports its place, and then the job ends with the original message.
A member that is lost meanwhile is left out, and the generation is begun again, as it is where the coordinator is lost.
Any other error ends the job at once: a checkpoint must not stand in the way of the original failure.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from megatron_recycle.membership import messages, records
from megatron_recycle.membership.decisions import AwaitSaved, Emit, End, Step, Tell
from megatron_recycle.membership.inputs import Saved, SavedLate
from megatron_recycle.membership.names import in_order
from megatron_recycle.membership.persistent_map import put
from megatron_recycle.membership.protocol import Answer
from megatron_recycle.membership.sole_holders import lost_with
from megatron_recycle.membership.state import Closing, Member, Phase, State

LAST = "the job ends after a last checkpoint"
"""The reason for a generation that does not train."""


def end(state: State, status: int, message: str, now: float, again: bool = False) -> Step:
    """The job is over. In a final-checkpoint generation ``message`` is the reason why there is no checkpoint. After a
    signal that scripts handle themselves it describes how they have ended; the status is the signal's.

    Args:
        again: whether a restart of the script may do better.
    """
    if state.closing is not None:
        status, again = state.closing.status, state.closing.again
        message = f"{sentence(state.closing.message)} No checkpoint was written: {sentence(message)} {last(state)}"
    if state.script.asked is not None:
        status, why = state.script.asked
        message, again = f"{why}, which the script handles itself: {message}", False
    recipients = tuple(incarnation for incarnation in state.known if incarnation not in state.absent.fenced)
    event = {
        "event": "finished",
        "t": now,
        "generation": state.generation,
        "iteration": state.progress.committed if state.progress.committed >= 0 else None,
        "status": status,
        "message": message,
        "out": dict(state.absent.out),
    }
    record = records.ended(status, message, again, event)
    decisions = (record, Emit(event), messages.end(recipients, status, message), End(status, message, again))
    return state.with_(phase=Phase.ENDED, ended=(status, message, again)), decisions


def sentence(text: str) -> str:
    """The text with a full stop."""
    return text if text.endswith(".") else f"{text}."


def last(state: State) -> str:
    """The last committed iteration, as a sentence."""
    return f"Last committed iteration: {state.progress.committed if state.progress.committed >= 0 else 'none'}."


def possible(state: State, lost: Collection[str]) -> bool:
    """Whether the job wants a last checkpoint, and the members without ``lost`` could write it."""
    return why_not(state, lost) is None


def why_not(state: State, lost: Collection[str]) -> str | None:
    """Why they could not; None if they can, empty if the reason need not be given."""
    wanted = state.job.emergency
    if wanted is False or state.progress.committed < 0:
        return ""
    if wanted is None:
        return "the plugin has none to write from this script (it has with DeepSpeed and Megatron-LM's own loop)"
    alone = lost_with(state, lost)
    empty = [str(one.stage) for one in alone if one.shard is None]
    if empty:
        return f"stage {', '.join(empty)} has no worker left"
    return f"nobody is left who has {alone[0]}" if alone else None


def goes_on(state: State, lost: Collection[str], reason: str | None) -> bool:
    """Whether a last generation can be begun again: without these, or, with neither them nor another ``reason``, as the
    coordinator was lost."""
    return (bool(lost) or reason is None) and not lost_with(state, lost)


def wanted(state: State) -> bool:
    """Whether a job that is asked to leave saves first, and can."""
    return state.job.on_leave == "checkpoint" and possible(state, ())


def limit(state: State, now: float) -> tuple[AwaitSaved, ...]:
    """The limit of a last generation, which further losses and another coordinator keep; none for other generations."""
    if state.closing is None:
        return ()
    until = state.closing.until
    return (AwaitSaved(state.generation, None if until is None else max(0.0, round(until - now, 3))),)


def answer(member: Member, number: int) -> Tell:
    """To a worker that waits in its error: it goes on in the generation last announced to it."""
    return Tell((member.incarnation,), Answer(number))


def noted(state: State, happened: Saved) -> tuple[State, Closing | None]:
    """Note the place of a member's part; returns the updated closing, None if the message is void."""
    member, closing = state.member(happened.incarnation), state.closing
    if member is None or closing is None or happened.generation != state.generation:
        return state, None
    closing = replace(closing, saved=put(closing.saved, member.worker, (happened.place, happened.error)))
    return state.with_(closing=closing), closing


def saved(state: State, happened: Saved, now: float) -> Step:
    """The job ends when all members have reported the place of their part."""
    state, closing = noted(state, happened)
    if closing is None or len(closing.saved) < len(state.members):
        return state, ()
    errors = {name: closing.saved[name][1] for name in in_order(closing.saved) if closing.saved[name][1]}
    place = next((where for where, _ in closing.saved.values() if where), "")
    if errors or not place or state.resume is None:
        first = next(iter(errors), "")
        shared = len(errors) == len(state.members) and len(set(errors.values())) == 1
        text = errors.get(first, "those that were to write it have lost one another")
        return end(state, 1, text if shared or not first else f"{first}: {text}", now)
    iteration, status = state.resume.target, closing.status
    event = {"event": "saved", "t": now, "generation": state.generation, "iteration": iteration, "place": place}
    message = f"{sentence(closing.message)} The state after iteration {iteration} is saved in {place}."
    state, ending = end(state.with_(closing=None), status, message, now, closing.again)
    return state, (Emit(event), *ending)


def late(state: State, happened: SavedLate, now: float) -> Step:
    """The time for a last checkpoint is over: the job ends without."""
    if state.closing is None or happened.generation != state.generation:
        return state, ()
    missing = [name for name in in_order(state.members) if name not in state.closing.saved]
    return end(state, 1, f"it took too long ({', '.join(missing)})", now)
