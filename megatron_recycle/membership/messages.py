"""Messages of several decisions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import Enum

from megatron_recycle.membership.decisions import StopAll, Tell
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.protocol import End, Learnt, Offer, Stop
from megatron_recycle.membership.state import Member, State

FENCED_STATUS = 3
"""Exit status of a worker that learns that it was declared out."""


class Role(str, Enum):
    """The role of a process in a new generation."""

    MEMBER = "member"
    OUTSIDE = "outside"


def group_prefix(generation: int, members: Mapping[str, str]) -> str:
    """The store prefix of a generation's groups: workers that disagree on the members never meet."""
    text = json.dumps(dict(members), sort_keys=True, separators=(",", ":"))
    return f"g{generation}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def stop(state: State) -> StopAll:
    """The end of all generations before the current one, with its members; see `wire_forms`."""
    return StopAll(state.generation, state.incarnations(), state.absent.out)


def wire_forms(tell: Tell) -> list[Tell]:
    """The messages on the wire. A stop is the most urgent: each process gets only its own role in the new generation,
    since sending thousands of workers the roles of all would take longer than the decision."""
    message = tell.message
    if not isinstance(message, StopAll):
        return [tell]
    members = set(message.members.values())
    return [Tell(tuple(one for one in tell.to if (one in members) is inside),
                 Stop(message.generation, role.value, len(message.out)))
            for inside, role in ((True, Role.MEMBER), (False, Role.OUTSIDE))]


def switch(state: State) -> Offer:
    """The offer of a boundary: an offer without a plan."""
    return Offer(state.generation, state.round.switch, None)


def end(to: tuple[str, ...], status: int, message: str) -> Tell:
    """The job is over for these incarnations."""
    return Tell(to, End(status, message))


def ended(state: State, incarnation: str) -> Tell:
    """The end of the job, sent to a process that comes too late."""
    status, message, _ = state.ended or (1, "the job has ended", False)
    return end((incarnation,), status, message)


def learnt(state: State, rank: int) -> Learnt:
    """To a process that is to join, before its script begins: the set-up record of its rank."""
    return Learnt(tuple(map(dict, state.forming.learnt.get(str(rank), ()))))


def refuse(member: Member, text: str) -> Tell:
    """Refusal of a process."""
    return end((member.incarnation,), 1, text)


def fence(state: State, member: Member) -> Tell:
    """The end for a process that was declared out, should it still live."""
    kind = state.absent.out.get(member.worker, FailureKind.EXIT)
    text = (
        f"worker {member.worker} was declared out ({kind}); the job goes on without it in generation "
        f"{state.generation}, and nothing this process does counts any more"
    )
    return end((member.incarnation,), FENCED_STATUS, text)


def farewell(member: Member, kind: FailureKind, generation: int) -> Tell:
    """The end of the job for a process that has asked to leave, or whose worker has moved."""
    moved = kind is FailureKind.MOVE
    why = "moved to another stage, where another process stands for it" if moved else "left as it was asked to"
    text = f"worker {member.worker} has {why}; the job goes on in generation {generation}"
    return end((member.incarnation,), 0, text)
