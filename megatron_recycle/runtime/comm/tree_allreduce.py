"""Sums of a few numbers over many workers, with as few messages as possible.

In gloo's all-reduce each of n workers sends 2n messages, one after the other, however small the tensor. In a binary
tree each worker sends and receives about two, and the last one has the sum after a number of steps that grows with the
logarithm.
"""

from __future__ import annotations

import torch

from megatron_recycle.runtime.comm.comm import Comm, wait_all


def add_up(tensor: torch.Tensor, comm: Comm, tag: int) -> None:
    """Sum ``tensor`` in place over ``comm``, the same bits on all members; none returns before all have called.

    The order of the additions depends on the number of members. ``tag`` names the messages; a caller must have this sum
    before it uses the tag again. Raises GenerationOver when the generation ends meanwhile.
    """
    me, size = comm.rank, comm.size
    children = [child for child in (2 * me + 1, 2 * me + 2) if child < size]
    parts = [torch.empty_like(tensor) for _ in children]
    wait_all([comm.receive(part, child, tag) for part, child in zip(parts, children)])
    for part in parts:
        tensor += part
    if me:
        parent = (me - 1) // 2
        total = torch.empty_like(tensor)
        answer = comm.receive(total, parent, tag)
        comm.send(tensor, parent, tag).wait()
        answer.wait()
        tensor.copy_(total)
    wait_all([comm.send(tensor, child, tag) for child in children])
