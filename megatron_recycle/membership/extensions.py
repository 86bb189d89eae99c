"""All extensions of the coordinator's half, in the order in which the core asks them. Pure, like `machine`.

Each is a class beside its functions; `extension` defines the places where it may add to the core. An extension missing
from this tuple is absent: its settings have no effect, and its inputs change nothing.
"""

from __future__ import annotations

from megatron_recycle.membership.bad_microbatch import BadMicrobatches
from megatron_recycle.membership.extension import Extension
from megatron_recycle.membership.guarding import LastCopies
from megatron_recycle.membership.lending_withdrawn import LentLayers
from megatron_recycle.membership.moving import Moves
from megatron_recycle.membership.partial_checkpoint import Survivors
from megatron_recycle.membership.policies import OtherPolicies
from megatron_recycle.membership.stage_restore import LostStages

EXTENSIONS: tuple[Extension, ...] = (
    Moves(),  # a worker takes an empty position of another stage
    LostStages(),  # a lost stage comes back from a copy or a checkpoint
    OtherPolicies(),  # all but reroute
    LastCopies(),  # guards of last copies, and warnings about them
    Survivors(),  # survivors of a lost stage save their state
    LentLayers(),  # layers changed by a script are no longer lent
    BadMicrobatches(),  # a bad micro-batch is left out (poison: skip)
)
