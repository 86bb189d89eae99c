"""When nobody is at fault: a message was lost or a connection broke, and all members live. Pure, like `machine`.

The remedy is a new generation with the same members; twice in a row without progress, and the job stops.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_recycle.membership import notices
from megatron_recycle.membership.decisions import AwaitLoss, Emit, Step
from megatron_recycle.membership.inputs import THE_END, Hinted
from megatron_recycle.membership.names import in_order, siblings
from megatron_recycle.membership.resume import RESTART, by_stage
from megatron_recycle.membership.state import Phase, State

_TRIES, _BUILDINGS = 2, 3
"""New generations with the same members in a row; more of them where not even their groups could be built, since that
may be slow, and gets more time each time."""
_ALIVE = ("stalled", "slow")


def hinted(state: State, happened: Hinted, now: float) -> Step:
    """Remembered; the first one of a generation starts the wait for the failure that may be behind it."""
    member = state.member(happened.incarnation)
    if member is None or happened.generation != state.generation or not in_force(state):
        return state, ()
    first = not state.hints
    state = state.with_(hints={**state.hints, member.worker: happened.error})
    return state, (AwaitLoss(state.generation, now),) if first else ()


def in_force(state: State) -> bool:
    """Whether members are told to train, as far as this coordinator knows."""
    return state.phase in (Phase.TRAINING, Phase.RETURNING)


def worn_out(state: State) -> bool:
    """Whether one more generation with the same members would be no better than the last ones."""
    built = len(state.resumed) == len(state.members)
    return state.mended >= (_TRIES if built else _BUILDINGS)


def spare(
    state: State, lost: Mapping[str, str], since: float, now: float
) -> tuple[State, dict[str, str], tuple[Emit, ...]]:
    """`lost` (worker -> kind) without those that live, only too slowly, and without whom a stage would be empty: to
    remove them would end the job, to wait may not. They are reported, once per generation."""
    kept: list[str] = []
    gone = {*lost, *siblings(state.members, lost)}
    for names in by_stage(state.stages, state.proven):
        if gone.issuperset(names):
            kept += [name for name in names if lost.get(name) in _ALIVE]
    events = tuple(
        Emit(notices.suspected(state, state.members[name], lost[name], since, now, removed=False))
        for name in in_order(set(kept) - state.spared)
    )
    left = {name: kind for name, kind in lost.items() if name not in kept}
    return state.with_(spared=state.spared.union(kept)), left, events


def errors(hints: Mapping[str, str]) -> str:
    """Who hinted, and why."""
    return "; ".join(f"{name}: {hints[name]}" for name in in_order(hints))


def waits(waiting: Mapping[str, str]) -> str:
    return "all workers wait: " + ", ".join(f"{name} for {waiting[name]}" for name in in_order(waiting))


def ended(waiting: Mapping[str, str]) -> str:
    """Whose script has ended."""
    return ", ".join(name for name in in_order(waiting) if waiting[name] == THE_END)


def given_up(state: State, reason: str, ended: str) -> str:
    """Why the job stops, though the script has ended on nobody but these."""
    remedy = ("look at the network between them" if not ended else
              f"the script has ended on {ended} while the others train on: let all ranks run the same number of "
              "iterations")
    return (f"the workers of generation {state.generation} all live but cannot work together ({reason}), and "
            f"{state.mended} new generations with the same members have not helped: {remedy}. {RESTART}")
