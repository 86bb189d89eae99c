"""Which layers a job may lend: what all processes of the stages say of theirs, put together, and taken back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_recycle.membership.names import Process


def lending(told: Mapping[str, Mapping[str, Any]], stages: int, placement: Sequence[int] = ()) -> dict[str, Any] | None:
    """For the planner, by chunk: ``layers`` that are alike, the ``share`` of a chunk's work that one of them takes, its
    ``bytes`` of parameters; by boundary how many may be lent (to the later chunk's stage, to the earlier one's). None
    if nothing may be lent.

    Args:
        told: the processes' descriptions. ``lend`` is "auto" where the user wants it; ``lend_layers``: most layers at a
            boundary; ``lendable``: for each chunk of the process' stage {"head", "tail": how many of its first and of
            its last layers may be lent, "layers", "share", "bytes", "like": the same for chunks whose layers are
            alike}, or None if it can neither lend nor borrow; None instead of the list: no chunk can.
        placement: the stage of each chunk, where stages have several.
    """
    at = tuple(placement) or tuple(range(stages))
    if stages < 2 or any(each.get("lend") != "auto" for each in told.values()):
        return None
    of: list[list[Mapping[str, Any]]] = [[] for _ in at]
    like: list[set[tuple[int | None, int]]] = [set() for _ in at]
    """By part, since tensor-parallel ones may differ among themselves."""
    for name, each in told.items():
        process, own = Process.parse(name), each.get("lendable") or []
        for place, chunk in enumerate(chunk for chunk, stage in enumerate(at) if stage == process.worker.stage):
            lendable = (own[place] if place < len(own) else None) or {}
            of[chunk].append(lendable)
            like[chunk].add((process.part, lendable.get("like", 0)))
    most = min((int(each.get("lend_layers", 2)) for each in told.values()), default=0)

    def least(chunk: int, key: str) -> int:
        return min((int(each.get(key, 0)) for each in of[chunk]), default=0)

    able = [all(row) for row in of]
    lend = [[min(most, least(chunk, "tail")), min(most, least(chunk + 1, "head"))]
            if able[chunk] and able[chunk + 1] and like[chunk] == like[chunk + 1] and at[chunk] != at[chunk + 1]
            else [0, 0] for chunk in range(len(at) - 1)]
    if not any(map(any, lend)):
        return None
    # One layer at least stays with its own chunk; it need not be like the others.
    return {"lend": lend,
            "layers": [max(least(chunk, key) for key in ("layers", "head", "tail")) for chunk in range(len(at))],
            "share": [max((float(each.get("share", 0.0)) for each in row), default=0.0) for row in of],
            "bytes": [max((int(each.get("bytes", 0)) for each in row), default=0) for row in of]}


def without(lent: Mapping[str, Any] | None, stage: int, placement: Sequence[int] = ()) -> dict[str, Any] | None:
    """What `lending` has made, without the layers of ``stage``; None if nothing is left, or was there."""
    if lent is None:
        return None
    at = placement or range(len(lent["lend"]) + 1)
    lend = [[0 if at[boundary] == stage else earlier, 0 if at[boundary + 1] == stage else later]
            for boundary, (earlier, later) in enumerate(lent["lend"])]
    return {**lent, "lend": lend} if any(map(any, lend)) else None


def allows(lent: Mapping[str, Any] | None, plan: Mapping[str, Any]) -> bool:
    """Whether a plan file's crossings stay within what `lending` has made."""
    lend = lent["lend"] if lent is not None else []
    return not any(by and not (boundary < len(lend) and -lend[boundary][0] <= by <= lend[boundary][1])
                   for crossing in (plan.get("crossings") or {}).values() for boundary, by in enumerate(crossing))
