"""All extensions of the coordinator's half, in the order in which the core asks them. Pure, like `machine`.

Each is a class beside its functions; `extension` says what it may add. An extension that is not in this tuple is not
there: its settings have no effect, and its inputs change nothing.
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
    LostStages(),  # a stage that nobody holds any more comes back from a copy or a checkpoint
    OtherPolicies(),  # all but reroute
    LastCopies(),  # copies of a stage's last copy; everybody is told of what is there only once
    Survivors(),  # survivors of a lost stage save what they hold
    LentLayers(),  # layers that a script has changed are not lent any more
    BadMicrobatches(),  # a bad micro-batch is left out (poison: skip)
)
