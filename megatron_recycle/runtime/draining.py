"""The end of a void attempt on the communicators that it was made on.

A wrong guess voids what all workers have of the next iteration, while all of them live: what one end has begun, the
other one can bring to its end. So nothing is aborted, and no communicator is made again, which takes NCCL seconds. Each
worker, stopped where :mod:`.halting` says, opens the void attempt, if it has not, tells how many transfers it has begun
on each of its channels, and then sends and receives what is missing. Equal parts of workers have channels of their own.
"""

from __future__ import annotations

import torch

from megatron_recycle.plan import channels
from megatron_recycle.runtime.comm.tags import DRAINS
from megatron_recycle.runtime.comm.tree_allreduce import add_up
from megatron_recycle.runtime.generation import Generation


def drain(generation: Generation, iteration: int) -> bool:
    """Bring what is under way of the attempt at ``iteration``, which all workers have opened, to its end; all members
    come here.

    Returns False, on all workers alike, where that cannot be done: new groups are needed then. Raises GenerationOver.
    """
    groups, transport = generation.groups, generation.transport
    plan = generation.program_of(iteration).plan
    pairs = sorted(channels(plan))
    mine = transport.begun()
    width, part = 2 * len(pairs), groups.part
    counts = torch.zeros(width * groups.parts + 1, dtype=torch.float64)
    own = [count for pair in pairs for count in mine.get(pair, (0, 0))]
    counts[part * width:(part + 1) * width] = torch.tensor(own)
    counts[-1] = not transport.can_drain
    add_up(counts, groups.control, DRAINS[iteration])
    *everybody, cannot = map(int, counts.tolist())
    if cannot:
        return False
    found = everybody[part * width:(part + 1) * width]
    transport.drain(plan, dict(zip(pairs, zip(found[::2], found[1::2], strict=True), strict=True)))
    for shared in list(generation.shared)[-1:]:
        shared.end()
    return True
