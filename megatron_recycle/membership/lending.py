"""Which layers a job may lend: what all processes of the stages say of theirs, put together, and taken back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_recycle.membership.names import Process


def lending(told: Mapping[str, Mapping[str, Any]], stages: int) -> dict[str, Any] | None:
    """For the planner, by stage: ``layers`` that are alike, the ``share`` of a stage's work that one of them takes, its
    ``bytes`` of parameters; by boundary how many may be lent (to the later stage, to the earlier one). None if nothing
    may be lent.

    Args:
        told: the processes' descriptions. ``lend`` is "auto" where the user wants it; ``lend_layers``: most layers at a
            boundary; ``lendable``: {"head", "tail": how many first and last layers of the stage may be lent, "layers",
            "share", "bytes", "like": the same on stages whose layers are alike}, or None for a process that can neither
            lend nor borrow.
    """
    if stages < 2 or any(each.get("lend") != "auto" for each in told.values()):
        return None
    of: list[list[Mapping[str, Any]]] = [[] for _ in range(stages)]
    like: list[set[tuple[int | None, int]]] = [set() for _ in range(stages)]
    """By part, since tensor-parallel ones may differ among themselves."""
    for name, each in told.items():
        process = Process.parse(name)
        of[process.worker.stage].append(each.get("lendable") or {})
        like[process.worker.stage].add((process.part, (each.get("lendable") or {}).get("like", 0)))
    most = min((int(each.get("lend_layers", 2)) for each in told.values()), default=0)

    def least(stage: int, key: str) -> int:
        return min((int(each.get(key, 0)) for each in of[stage]), default=0)

    able = [all(row) for row in of]
    lend = [[min(most, least(stage, "tail")), min(most, least(stage + 1, "head"))]
            if able[stage] and able[stage + 1] and like[stage] == like[stage + 1] else [0, 0]
            for stage in range(stages - 1)]
    if not any(map(any, lend)):
        return None
    # One layer at least stays with its own stage; it need not be like the others.
    return {"lend": lend,
            "layers": [max(least(stage, key) for key in ("layers", "head", "tail")) for stage in range(stages)],
            "share": [max((float(each.get("share", 0.0)) for each in row), default=0.0) for row in of],
            "bytes": [max((int(each.get("bytes", 0)) for each in row), default=0) for row in of]}


def without(lent: Mapping[str, Any] | None, stage: int) -> dict[str, Any] | None:
    """What `lending` has made, without the layers of ``stage``; None if nothing is left, or was there."""
    if lent is None:
        return None
    lend = [[0 if boundary == stage else earlier, 0 if boundary + 1 == stage else later]
            for boundary, (earlier, later) in enumerate(lent["lend"])]
    return {**lent, "lend": lend} if any(map(any, lend)) else None
