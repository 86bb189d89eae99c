"""Open positions of the grid, for a host that joins a running job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_recycle.membership.names import in_order
from megatron_recycle.membership.protocol import Places
from megatron_recycle.membership.state import Phase, State

_KEPT_S = 120.0
"""Seconds that a position is reserved for the host it was offered to, until its process says hello."""
_AGAIN_S = 2.0
"""Seconds after which a host may ask again for a position."""


@dataclass(frozen=True)
class Offered:
    """Facts for a host that joins: the settings in the environment."""

    environ: Mapping[str, str]


@dataclass
class Reservations:
    """The coordinator's offered positions, and until when each is reserved."""

    offered: Offered
    kept: dict[str, float] = field(default_factory=dict)
    asked_from: float = 0.0
    """Start of offers: hosts with a reservation from an earlier coordinator come first."""

    def taken(self, name: str) -> None:
        """The process for this position has said hello: the reservation ends, whatever becomes of it."""
        self.kept.pop(name, None)


def failed_too_often(state: State, failures: Mapping[str, int]) -> frozenset[str]:
    """The hosts, without their launchers' numbers, that get no more positions; ``failures``: by host, its workers'
    failures."""
    most = state.job.max_failures_per_host
    return frozenset(host for host, count in failures.items() if most and count >= most)


def plain(host: str) -> str:
    """A host's name without its launcher's number: n3 of n3/2."""
    return host.rpartition("/")[0] or host


def free_places(state: State, places: Reservations | None, count: int, now: float, host: str = "",
                failures: Mapping[str, int] | None = None) -> Places:
    """The answer to a ``host`` that asks for `count` positions at the time `now`; see `failed_too_often`."""
    if places is None:
        return Places(refusal="it was not started by `recycle run`, so that nobody tells a host where to meet")
    if state.phase in (Phase.FORMING, Phase.ENDED):
        if state.phase is Phase.ENDED:
            return Places(refusal="it is over")
        return Places(refusal="its training has not begun yet", again_s=_AGAIN_S)
    if plain(host) in failed_too_often(state, failures or {}):
        return Places(refusal=f"workers of {plain(host)} have failed in it too often (max_failures_per_host)")
    if now < places.asked_from:
        return Places(refusal="its coordinator has only just come", again_s=_AGAIN_S)
    empty = _empty(state)
    free = [name for name in empty if places.kept.get(name, now) <= now][:count]
    if not free:
        waiting = "" if not empty else "; others are about to join"
        return Places(refusal=f"it has no place without a worker ({len(state.forming.ranks)} in all){waiting}",
                       again_s=_AGAIN_S)
    places.kept.update(dict.fromkeys(free, now + _KEPT_S))
    ranks, offered = [state.forming.ranks[name] for name in free], places.offered
    return Places(ranks=tuple(ranks), size=state.size, environ=dict(offered.environ))


def promised_before(state: State, places: Reservations, ranks: Sequence[int], now: float) -> None:
    """A joining host names its ranks: positions that the previous coordinator promised to it are reserved again."""
    if now < places.asked_from:
        places.kept.update({name: now + _KEPT_S for name in _empty(state) if state.forming.ranks[name] in ranks})


def _empty(state: State) -> list[str]:
    occupied = {*state.members, *state.arrivals.joiners, *state.absent.stranded, *state.moving.moves}
    return [name for name in in_order(state.forming.ranks) if name not in occupied]
