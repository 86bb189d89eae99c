"""What has been done of that which must not be done twice: the marks of asks.

A process asks in slots, in each one thing after the other, and numbers what it asks. So the last mark of a slot tells
of an ask that comes again, since its answer was lost, whether it was done and what its answer was.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_recycle.membership.protocol import Mark

_SLOTS = 1 << 16


class Marks:
    """The last ask of each slot, which asks one thing after the other; one that has changed nothing has no key."""

    def __init__(self) -> None:
        self._of_slot: dict[str, Mark] = {}
        self._of_key: dict[str, set[str]] = {}

    def put(self, slot: str, mark: Mark) -> None:
        """It was done, unless something later is known of this slot."""
        before = self._of_slot.get(slot)
        if before is not None and (before[0] > mark[0] or (before[0] == mark[0] and before[2])):
            return
        self._drop(slot)
        self._of_slot[slot] = mark
        if mark[2]:
            self._of_key.setdefault(mark[2], set()).add(slot)
        if len(self._of_slot) > _SLOTS:
            self._drop(next(iter(self._of_slot)))

    def get(self, slot: str) -> Mark:
        return self._of_slot.get(slot, (-1, 0, ""))

    def on(self, keys: Iterable[str]) -> dict[str, Mark]:
        """Those of asks that have changed one of ``keys``."""
        return {slot: self._of_slot[slot] for key in keys for slot in self._of_key.get(key, ())}

    def _drop(self, slot: str) -> None:
        _, _, key = self._of_slot.pop(slot, (-1, 0, ""))
        if key:
            self._of_key[key].discard(slot)
            if not self._of_key[key]:
                del self._of_key[key]


def named(once: str) -> tuple[str, int]:
    """Slot and number of an ask, as ``SLOT:NUMBER``; without a name it is of no slot. Raises ValueError."""
    slot, _, number = once.rpartition(":")
    return (slot, int(number)) if once else ("", -1)
