"""All policies by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from megatron_recycle.tools.simulate.policies.bamboo import Bamboo
from megatron_recycle.tools.simulate.policies.base import Policy
from megatron_recycle.tools.simulate.policies.ideals import FaultScaled, Ideal
from megatron_recycle.tools.simulate.policies.lent_layers import LentAndMoves, LentLayers
from megatron_recycle.tools.simulate.policies.oobleck import Oobleck
from megatron_recycle.tools.simulate.policies.others import ElasticBatch, MovedLayers, ReCycle, TorchFT
from megatron_recycle.tools.simulate.policies.recycling import (
    CheckpointRestart,
    Dropping,
    LossyForward,
    Recycling,
    RollBack,
    Stalls,
    WithoutMoves,
)
from megatron_recycle.tools.simulate.trace import TraceError

_OURS = (Recycling, WithoutMoves, LentAndMoves, LentLayers, Dropping, RollBack, LossyForward, CheckpointRestart,
         ReCycle, MovedLayers, ElasticBatch, TorchFT)
_REST: tuple[type[Policy], ...] = (Bamboo, Oobleck, FaultScaled, Ideal)
ORDER = ("ours", "ours-no-moves", "lent-and-moves", "lent-layers", "recycle-published", "moved-layers", "drop",
         "torchft", "rollback", "lossy-forward", "bamboo", "oobleck", "elastic-batch", "checkpoint-restart",
         "fault-scaled", "fault-free")
"""Names in the order of tables."""
USUAL = ("ours", "lent-and-moves", "recycle-published", "oobleck", "bamboo", "torchft", "checkpoint-restart",
         "fault-scaled", "fault-free")
"""What is compared if nobody says what."""


def makers(names: Iterable[str], stalls: Stalls) -> dict[str, Callable[[], Policy]]:
    """A maker of each of these policies, with our own stalls. Raises TraceError for a name that is none."""
    known: dict[str, Callable[[], Policy]] = {made.name: partial(made, stalls) for made in _OURS}
    known.update({made.name: made for made in _REST})
    wanted = [*dict.fromkeys(names)]
    for name in wanted:
        if name not in known:
            raise TraceError(f"no policy {name!r}; there are {', '.join(ORDER)}, and all")
    return {name: known[name] for name in sorted(wanted, key=ORDER.index)}
