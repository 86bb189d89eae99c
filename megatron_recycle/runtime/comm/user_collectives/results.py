"""Results of the script's calls, for a worker that comes in later.

Its script makes the same calls while it catches up with the job, and may use their results: a seed, or the best loss so
far. Members keep small results that all of a group get alike, and send them to a joiner.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise

import torch
from msgspec.structs import astuple

from megatron_recycle.runtime.comm.user_collectives.calls import LARGE, Call
from megatron_recycle.runtime.comm.user_collectives.packing import Tensors, packed, size, unpacked
from megatron_recycle.runtime.iteration_history import History, Rows

MOST = 64 * 2**20
"""Bytes that a worker keeps at most, of all its groups."""
_SMALL = 4096
"""Bytes up to which a result is kept apart from larger ones, which never evict it."""


def as_row(call: Call) -> bytes:
    """The results of ``call``, which has ended, as bytes; empty where there is nothing to keep: they differ by member,
    or have more than `LARGE` bytes."""
    results = call.results()
    if not results or size(results) > LARGE:
        return b""
    return f"{_kind(call, results)}\n".encode() + packed(results).numpy().tobytes()


def recall(call: Call, row: bytes) -> bool:
    """Give ``call`` the results in ``row``; False if they are of another kind of call."""
    kind, _, data = row.partition(b"\n")
    name_of_call, *layout = kind.decode().split(" ")
    own = call.results()
    if name_of_call != call.what or own is None or (not call.measured and kind.decode() != _kind(call, own)):
        return False
    like = [torch.empty(int(count), dtype=getattr(torch, name))
            for name, _, count in (each.partition(":") for each in layout)]
    with torch.no_grad():
        call.recall(unpacked(torch.frombuffer(bytearray(data), dtype=torch.uint8), like))
    return True


def _kind(call: Call, results: Tensors) -> str:
    return " ".join([call.what, *(f"{str(each.dtype).removeprefix('torch.')}:{each.numel()}" for each in results)])


class Results:
    """Rows (`as_row`) by group and ascending number.

    If they take too much memory, the group that takes the most drops its oldest.

    Args:
        most: limit in bytes.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._kept: dict[tuple[str, bool], History] = {}

    @property
    def groups(self) -> list[str]:
        """The groups that have results."""
        return sorted({group for group, _ in self._kept})

    def note(self, group: str, number: int, row: bytes) -> None:
        """Keep ``row``, the results of call ``number`` of ``group``."""
        if not row:
            return
        self._kept.setdefault((group, len(row) > _SMALL), History(self._most)).note(number, row)
        while sum(kept.nbytes for kept in self._kept.values()) > self._most:
            max(self._kept.values(), key=lambda kept: kept.nbytes).let_go()

    def of(self, group: str, number: int) -> bytes | None:
        """The row of this call; None: unknown."""
        found = (self._kept[group, large].exactly(number) for large in (False, True) if (group, large) in self._kept)
        return next((row for row in found if row is not None), None)

    def told(self, names: Mapping[str, str]) -> bytes:
        """All rows of the groups in ``names``, under the receiver's names for them; empty if there are none."""
        rows = [(names[group], large, astuple(kept.told()))
                for (group, large), kept in self._kept.items() if group in names]
        if not rows:
            return b""
        table = [[group, large, *map(len, parts)] for group, large, parts in rows]
        return b"\n".join([json.dumps(table).encode(), b"".join(
            part.numpy().tobytes() for _, _, parts in rows for part in parts)])

    def take(self, message: bytes) -> None:
        """Take the rows that another worker has `told`, in place of this one's for the same groups."""
        table, _, data = message.partition(b"\n")
        start = 0
        for group, large, *lengths in json.loads(table):
            ends = [start + sum(lengths[:count]) for count in range(len(lengths) + 1)]
            parts = [torch.frombuffer(bytearray(data[one:end]), dtype=torch.uint8) if end > one else
                     torch.empty(0, dtype=torch.uint8) for one, end in pairwise(ends)]
            kept = self._kept[group, large] = History(self._most)
            kept.take(Rows(*parts))
            start = ends[-1]
