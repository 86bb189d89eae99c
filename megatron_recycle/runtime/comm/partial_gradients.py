"""Partial gradients: each tensor-parallel part of a worker has a share (norms under sequence parallelism). All parts
have the parameter; its gradient is the sum over them.

They are added up after the sum over peers, as in Megatron. A worker has all of its parts or is out, so that the sum has
the same addends, and the same bits, whatever the membership.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.sharded_reduction import Cuts, overlaps, write_spans
from megatron_recycle.runtime.compute.accumulate import Layout


def fold_parts(partial: Sequence[nn.Parameter], layout: Layout, gradient: torch.Tensor, groups: Groups,
               cuts: Cuts | None) -> None:
    """Replace the gradients of ``partial`` in this part's reduced ``gradient``, flat or with ``cuts`` packed, by their
    sums over all parts, in place. Raises GenerationOver."""
    if groups.siblings is None or not partial:
        return
    wanted = [(start, start + parameter.numel()) for parameter in partial
              for start in [layout.starts[id(parameter)]]]
    if cuts is not None:
        held = [span for shard in cuts.of(groups.me) for span in cuts.spans(shard, layout)]
        wanted = [inside for inside, _ in overlaps(held, [(start, start, end - start) for start, end in wanted])]
    if not wanted:
        return
    values = torch.cat([gradient[start:end] for start, end in wanted])
    groups.siblings.sum(values).wait()
    write_spans(gradient, wanted, values)
