"""A made boundary, at which processes come in and others leave. Pure, like `machine`.

Once a joiner is ready, or a member has asked to leave, and no recovery is under way, the members are offered a switch:
like a better plan it is agreed upon with a commit. They then stand still between two iterations, with nothing in
flight. When all have reported that, a new generation is decided, as after a failure: with the joiners, and without the
leavers. A failure meanwhile cancels the switch; it is offered again after the recovery.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from megatron_recycle.membership import failing, finish, job_end, messages, records
from megatron_recycle.membership.decisions import Decision, Step, Tell
from megatron_recycle.membership.extension import IN_FORCE, merged
from megatron_recycle.membership.failure_kinds import FailureKind
from megatron_recycle.membership.inputs import Boundary
from megatron_recycle.membership.names import Process, in_order
from megatron_recycle.membership.persistent_map import put
from megatron_recycle.membership.resume import RESTART, by_stage
from megatron_recycle.membership.shards import those_that_may_go
from megatron_recycle.membership.state import Closing, Member, Phase, State

_GIVE = "those that leave hand their shards of the optimizer's state over first"


def propose(state: State, decisions: tuple[Decision, ...]) -> Step:
    """Offer a switch after `decisions` if there is a reason for one and none is on offer."""
    quiet = state.phase is Phase.TRAINING and state.since is None and not state.round.switch
    asked = state.arrivals.joiners or state.absent.leaving or _unasked(state)
    if not quiet or not asked or not (entering(state) or _going(state) or _give_first(state)):
        return state, decisions
    number = state.offers + 1
    state = state.with_(switch=number, offers=number)
    offer = Tell(tuple(state.incarnations().values()), messages.switch(state))
    return state, (*decisions, records.offer(state, number), offer)


def stands(state: State, happened: Boundary, now: float) -> Step:
    """A member stands at the boundary."""
    return switch(_stands(state, happened), now)


def switch(state: State, now: float) -> Step:
    """The next generation, once all members stand at the boundary."""
    if not _all_stand(state):
        return state, ()
    leavers = _going(state)
    if (text := _stage_left(state, leavers)) and job_end.wanted(state):
        return finish.leave(state, Closing(text, again=True), now)
    if text:
        return job_end.end(state, 1, text, now, again=True)
    reason = None if leavers or entering(state) else _GIVE
    return failing.next_generation(state, leavers, now, now, joined=entering(state), reason=reason)


def entering(state: State) -> dict[str, Member]:
    """The processes that can be taken in: joiners, and with them the stranded parts of their worker. A worker comes in
    with all its parts, or not at all."""
    found = {
        name: member
        for name, member in {**state.absent.stranded, **state.arrivals.joiners}.items()
        if member.incarnation in state.arrivals.prepared and name not in state.members
    }
    parts = Counter(Process.parse(name).worker for name in found)
    wanted = state.job.parts
    return {name: member for name, member in found.items() if parts[Process.parse(name).worker] == wanted}


def _going(state: State) -> dict[str, FailureKind]:
    """The members that leave at the boundary, and whether on request or after a move. A member that a joiner needs as
    source stays until the copy is done; the sole holder of a shard stays until others have it."""
    wanted = _wanted(state)
    if state.resume is None:
        return wanted
    may_go = those_that_may_go(state.resume.shards, [*wanted], state.proven)
    return {name: kind for name, kind in wanted.items() if name in may_go}


def _give_first(state: State) -> bool:
    """Whether some member would leave if others had its shards, which they get with the next generation."""
    return _going(state).keys() != _wanted(state).keys()


def _wanted(state: State) -> dict[str, FailureKind]:
    """`_going`, as if no optimizer were cut into shards."""
    wanted = [name for name, member in state.members.items() if member.incarnation in state.absent.leaving]
    unasked = {name: kind for name, kind in _unasked(state).items() if name not in wanted}
    staying = by_stage(state.stages, set(state.proven) - set(wanted))
    joining = by_stage(state.stages, entering(state))
    kept = {names[0] for stage, names in enumerate(by_stage(state.stages, wanted))
            if names and joining[stage] and not staying[stage]}
    going = [name for name in in_order(wanted) if name not in kept]
    return {**dict.fromkeys(going, FailureKind.LEAVE), **unasked}


def _unasked(state: State) -> dict[str, FailureKind]:
    """Members that leave without having asked to."""
    return merged(each.going(state) for each in IN_FORCE)


def _stands(state: State, happened: Boundary) -> State:
    """A member waits at the boundary. It repeats this to a restarted coordinator."""
    member = state.member(happened.incarnation)
    if member is None or not state.in_force or happened.generation != state.generation:
        return state
    return state.with_(standing=put(state.round.standing, member.worker, happened.t))


def _all_stand(state: State) -> bool:
    standing = state.round.standing
    return state.phase is Phase.TRAINING and bool(standing) and standing.keys() >= state.members.keys()


def _stage_left(state: State, leavers: Mapping[str, FailureKind]) -> str | None:
    """Why the job cannot go on without `leavers`; None if it can."""
    left = by_stage(state.stages, set(state.proven) - set(leavers))
    stage = next((stage for stage, names in enumerate(left) if not names), None)
    if stage is None:
        return None
    names = ", ".join(name for name in leavers if Process.parse(name).worker.stage == stage)
    return (f"stage {stage} would have no worker any more: the last of it leave as they were asked to ({names}); last "
            f"committed iteration: {state.progress.committed}. {RESTART}")
