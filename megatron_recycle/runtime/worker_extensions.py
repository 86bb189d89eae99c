"""All extensions of a worker, in the order in which each point of training calls them.

The order counts: shards reach their holders before peers are compared and registered state is given; peers are
compared before their state is copied; nothing comes after the last checkpoint.
"""

from __future__ import annotations

from megatron_recycle.runtime.first_forward import FirstForwards
from megatron_recycle.runtime.guard import LastCopies
from megatron_recycle.runtime.last_checkpoint import LastCheckpoint
from megatron_recycle.runtime.replica_check import PeerCheck
from megatron_recycle.runtime.script_calls import RegisteredState, ScriptCalls
from megatron_recycle.runtime.shard_moves import ShardMoves
from megatron_recycle.runtime.worker_extension import WorkerExtension

ALL: tuple[WorkerExtension, ...] = (
    ScriptCalls(),  # evaluations, and collectives and transfers of the script's own
    ShardMoves(),  # of optimizers whose state is cut into shards
    RegisteredState(),  # of scripts
    PeerCheck(),  # whether peers are equal
    FirstForwards(),  # whether a forward depends on when it is run
    LastCopies(),  # the way back of a lost stage
    LastCheckpoint(),  # of a job that cannot go on
)
