"""What a host that joins with the lesser secret may write to the job's store: what its workers need there, no more.

That is the part of the generation in force, as long as one of its members has joined so: there the members meet. Keys
that a process with the job's token has written stay as they are. All can be read, since a script may wait for any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from megatron_recycle.control.wire import GUEST
from megatron_recycle.membership import messages
from megatron_recycle.membership.protocol import Ask
from megatron_recycle.membership.state import State

_READS = ("get", "wait", "around", "check", "count", "list")


def part(state: State) -> str:
    """Where in the store guests meet the others; "" if none of them is a member."""
    members = state.incarnations() if state.go is None else state.go.members
    if not any(incarnation.startswith(GUEST) for incarnation in members.values()):
        return ""
    return f"recycle/{messages.group_prefix(state.generation, members) if state.go is None else state.go.prefix}"


def of_guests(state: State, rank: int, pid: int | None = None) -> bool:
    """Whether a host that has joined may speak of this rank: its process is one that has joined, or is unknown."""
    processes = state.members if pid is None else state.known
    return all(one.incarnation.startswith(GUEST) or pid not in (None, one.pid)
               for one in processes.values() if one.rank == rank)


@dataclass
class Guests:
    """Remembers which keys guests have written, in the part that they write to now."""

    _part: str = ""
    _written: set[str] = field(default_factory=set)

    def refusal(self, ask: Ask, part: str, there: Callable[[str], bool]) -> str:
        """Why this ask of a guest's is not carried out; "" if it is. ``there``: whether a key has a value."""
        if ask.op in _READS:
            return ""
        if part != self._part:
            self._part, self._written = part, set()
        for key in ask.keys:
            if not part or not key.startswith((f"{part}/", f"{part}-r")):
                return (f"{key!r:.80}: a host that has joined with join.token writes only where the workers of the "
                        "generation in force meet, and may read the rest: to write more, join with the job's token")
            if key not in self._written and there(key):
                return f"{key!r:.80}: a worker with the job's token has written it"
        self._written.update(ask.keys)
        return ""

    def tellable(self, ask: Ask, part: str, there: Callable[[str], bool]) -> Ask:
        """What counts of all that a guest tells a coordinator which has come back."""
        told = [each for each in zip(ask.keys, ask.values, ask.stamps)
                if not self.refusal(Ask("set", (each[0],)), part, there)]
        return replace(ask, keys=tuple(key for key, _, _ in told), values=tuple(value for _, value, _ in told),
                       stamps=tuple(stamp for _, _, stamp in told), marks={})
