"""Lendable layers of a job: merged from the descriptions of the stages' processes, or withdrawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from msgspec.structs import replace

from megatron_recycle.membership.description import Description, Lendable, Lending
from megatron_recycle.membership.names import Process
from megatron_recycle.plan.plan_file import PlanFile

_NONE = Lendable()
_HEAD, _TAIL, _LAYERS = (attrgetter(name) for name in ("head", "tail", "layers"))


def lending(descriptions: Mapping[str, Description], stages: int, placement: Sequence[int] = ()) -> Lending | None:
    """The lendable layers, for the planner; None if none may be lent.

    Args:
        descriptions: the processes' descriptions.
        placement: the stage of each chunk, where stages have several.
    """
    at = tuple(placement) or tuple(range(stages))
    if stages < 2 or any(each.lend != "auto" for each in descriptions.values()):
        return None
    of: list[list[Lendable]] = [[] for _ in at]
    like: list[set[tuple[int | None, int]]] = [set() for _ in at]
    """By part, since the tensor-parallel parts may differ."""
    for name, each in descriptions.items():
        process, own = Process.parse(name), each.lendable or ()
        for place, chunk in enumerate(chunk for chunk, stage in enumerate(at) if stage == process.worker.stage):
            lendable = (own[place] if place < len(own) else None) or _NONE
            of[chunk].append(lendable)
            like[chunk].add((process.part, lendable.like))
    most = min((each.lend_layers for each in descriptions.values()), default=0)

    def least(chunk: int, count: Callable[[Lendable], int]) -> int:
        return min(map(count, of[chunk]), default=0)

    able = [_NONE not in row for row in of]
    lend = tuple((min(most, least(chunk, _TAIL)), min(most, least(chunk + 1, _HEAD)))
                 if able[chunk] and able[chunk + 1] and like[chunk] == like[chunk + 1] and at[chunk] != at[chunk + 1]
                 else (0, 0) for chunk in range(len(at) - 1))
    if not any(map(any, lend)):
        return None
    # At least one layer stays with its own chunk; it need not be like the others.
    return Lending(
        lend, tuple(max(least(chunk, count) for count in (_LAYERS, _HEAD, _TAIL)) for chunk in range(len(at))),
        tuple(max((each.share for each in row), default=0.0) for row in of),
        tuple(max((each.bytes for each in row), default=0) for row in of))


def without(lent: Lending | None, stage: int, placement: Sequence[int] = ()) -> Lending | None:
    """The result of `lending` without the layers of ``stage``; None if nothing is left."""
    if lent is None:
        return None
    at = placement or range(len(lent.lend) + 1)
    lend = tuple((0 if at[boundary] == stage else earlier, 0 if at[boundary + 1] == stage else later)
                 for boundary, (earlier, later) in enumerate(lent.lend))
    return replace(lent, lend=lend) if any(map(any, lend)) else None


def allows(lent: Lending | None, plan: PlanFile) -> bool:
    """Whether a plan file's crossings stay within the result of `lending`."""
    lend = lent.lend if lent is not None else ()
    return not any(by and not (boundary < len(lend) and -lend[boundary][0] <= by <= lend[boundary][1])
                   for crossing in plan.crossings.values() for boundary, by in enumerate(crossing))
