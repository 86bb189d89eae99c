"""Sums of a few numbers over many workers, with as few messages as there can be.

gloo's all-reduce sends twice as many messages as there are workers from each of them, one after the other, however
small the tensor. In a binary tree each worker sends and receives about two, and the last one has the sum after a
number of steps that grows with the logarithm.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_recycle.errors import GenerationOver
from megatron_recycle.runtime.comm.handles import wait_for


def add_up(tensor: torch.Tensor, group: dist.ProcessGroup, tag: int) -> None:
    """Sum ``tensor`` in place over ``group``, the same bits on all members; nobody has it before all have given theirs.

    The order of the additions depends on the group's size. ``tag`` names the messages; whoever uses it again on the
    same handles must have this sum first. Raises GenerationOver when the generation ends meanwhile.
    """
    me, size = group.rank(), group.size()
    children = [child for child in (2 * me + 1, 2 * me + 2) if child < size]
    parts = [torch.empty_like(tensor) for _ in children]
    try:
        for work in [group.recv([part], child, tag) for part, child in zip(parts, children)]:
            wait_for(work, group)
        for part in parts:
            tensor += part
        if me:
            parent = (me - 1) // 2
            total = torch.empty_like(tensor)
            answer = group.recv([total], parent, tag)
            wait_for(group.send([tensor], parent, tag), group)
            wait_for(answer, group)
            tensor.copy_(total)
        for work in [group.send([tensor], child, tag) for child in children]:
            wait_for(work, group)
    except RuntimeError as error:
        raise GenerationOver(f"adding up over all workers failed: {error}") from error
