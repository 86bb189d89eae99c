"""All policies by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from megatron_recycle.tools.simulate.policies.bamboo import Bamboo
from megatron_recycle.tools.simulate.policies.base import Policy
from megatron_recycle.tools.simulate.policies.ideals import FaultScaled, Ideal
from megatron_recycle.tools.simulate.policies.oobleck import Oobleck
from megatron_recycle.tools.simulate.policies.others import ElasticBatch, MovedLayers, ReCycle, TorchFT
from megatron_recycle.tools.simulate.policies.recycling import (
    CheckpointRestart,
    Dropping,
    LentAndMoves,
    LentLayers,
    LossyForward,
    Recycling,
    RollBack,
    Stalls,
    WithoutMoves,
)
from megatron_recycle.tools.simulate.trace import TraceError

_POLICIES: tuple[Any, ...] = (
    Recycling, WithoutMoves, LentAndMoves, LentLayers, ReCycle, MovedLayers, Dropping, TorchFT, RollBack, LossyForward,
    Bamboo, Oobleck, ElasticBatch, CheckpointRestart, FaultScaled, Ideal)
"""All policies, in the order of tables."""
_WITHOUT_OURS = (Bamboo, Oobleck, FaultScaled, Ideal)
"""Policies with stalls of their own, or none."""
ORDER = tuple(made.name for made in _POLICIES)
"""Their names."""
USUAL = ("ours", "lent-and-moves", "recycle-published", "oobleck", "bamboo", "torchft", "checkpoint-restart",
         "fault-scaled", "fault-free")
"""The default comparison."""


def makers(names: Iterable[str], stalls: Stalls) -> dict[str, Callable[[], Policy]]:
    """A maker of each of these policies, with our own stalls. Raises TraceError for an unknown name."""
    known: dict[str, Callable[[], Policy]] = {made.name: partial(made, stalls) for made in _POLICIES}
    known |= {made.name: made for made in _WITHOUT_OURS}
    wanted = [*dict.fromkeys(names)]
    for name in wanted:
        if name not in known:
            raise TraceError(f"no policy {name!r}; there are {', '.join(ORDER)}, and all")
    return {name: known[name] for name in sorted(wanted, key=ORDER.index)}
