"""Reduction where a stage's optimizer state is cut into shards: only who holds a shard gets its slice of the gradient.

Raw pieces go to the first holder of each shard, which folds them in logical order and sends the result to the shard's
other holders: what `ExactReduction` does with slices for everybody. With `fast` a piece is all that a worker has
summed, and workers are folded in order. A flat buffer of the whole gradient results in which only this worker's shards
count, and, where stages share a parameter, that parameter's gradient, which all peers need to add up the stages'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_recycle.plan import Piece, Plan, Worker, pieces
from megatron_recycle.runtime.comm.comm import Comm, Pending
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.reduction import Reduction, fold, reduction_of
from megatron_recycle.runtime.comm.tags import PIECES, SHARD_SLICES, Tags
from megatron_recycle.runtime.comm.tied_gradients import fold_ties
from megatron_recycle.runtime.compute.accumulate import WHOLE, Accumulators, Layout
from megatron_recycle.runtime.stage import Averaging, Tie

Span = tuple[int, int]


@dataclass(frozen=True)
class Cuts:
    """A stage's shards in one generation.

    Attributes:
        holders: by shard, the workers that hold it; the first speaks for it.
        spans: how a shard lies in a flat gradient of a layout.
    """

    holders: tuple[tuple[Worker, ...], ...]
    spans: Callable[[int, Layout], Sequence[Span]]

    def of(self, worker: Worker) -> list[int]:
        """The shards of ``worker``."""
        return [shard for shard, holders in enumerate(self.holders) if worker in holders]

    def spoken_for(self, worker: Worker) -> list[int]:
        """Those that ``worker`` speaks for."""
        return [shard for shard, holders in enumerate(self.holders) if holders[0] == worker]


class ShardedReduction:
    """`Reduction` for the holders of shards.

    Args:
        inner: says where a micro-batch belongs, and what losses are.
        pieces: what all workers have summed, in logical order, and who has.
        factor: of the sum.
        cuts: who holds what.
    """

    def __init__(self, inner: Reduction, pieces: Callable[[Groups], Sequence[tuple[Piece, Piece, Worker]]],
                 factor: float, cuts: Cuts) -> None:
        self._inner = inner
        self._pieces = pieces
        self._factor = factor
        self.cuts = cuts
        self.place = inner.place
        self.losses = inner.losses
        self.mean_loss = inner.mean_loss

    def gradient(self, sums: Accumulators, groups: Groups, ties: Sequence[Tie] = ()) -> torch.Tensor:
        me, peers, layout, cuts = groups.me, groups.peers(groups.me.stage), sums.layout, self.cuts
        logical, stage = self._pieces(groups), groups.stage
        shards = range(len(cuts.holders))
        spans = [cuts.spans(shard, layout) for shard in shards]
        filled = [shard for shard in shards if spans[shard]]
        owners = [holders[0] for holders in cuts.holders]
        mine = {number: sums.sum(own) for number, (_, own, worker) in enumerate(logical) if worker == me}
        sending: list[Pending] = []
        arriving: dict[tuple[int, int], tuple[torch.Tensor, Pending]] = {}
        # Peers send to each other both ways: where a library runs what is posted one after the other, together only.
        with stage.batch():
            for number, (_, _, worker) in enumerate(logical):
                for shard in filled:
                    tag = PIECES[number * len(shards) + shard]
                    if worker == me != owners[shard]:
                        part = read_spans(mine[number], spans[shard])
                        sending.append(stage.send(part, peers.index(owners[shard]), tag))
                    elif owners[shard] == me != worker:
                        buffer = torch.empty(length_of(spans[shard]), dtype=layout.dtype, device=layout.device)
                        arriving[number, shard] = buffer, stage.receive(buffer, peers.index(worker), tag)
        result = layout.empty()
        for shard in (shard for shard in filled if owners[shard] == me):
            addends = []
            for number, (piece, _, worker) in enumerate(logical):
                if worker == me:
                    addends.append((piece, read_spans(mine[number], spans[shard])))
                else:
                    buffer, pending = arriving.pop((number, shard))
                    pending.wait()
                    addends.append((piece, buffer))
            write_spans(result, spans[shard], fold(addends).mul_(self._factor))
        for pending in sending:
            pending.wait()
        self._share(result, spans, owners, groups, [_span(layout, tie) for tie in ties if tie.parameter in layout])
        fold_ties(ties, layout, result, groups)
        return result

    def _share(self, result: torch.Tensor, spans: Sequence[Sequence[Span]], owners: Sequence[Worker], groups: Groups,
               tied: Sequence[Span]) -> None:
        """Who speaks for a shard sends it to its other holders, and what is ``tied`` of it to all other peers."""
        peers = groups.peers(groups.me.stage)

        def wanted(shard: int, worker: Worker) -> Sequence[Span]:
            return spans[shard] if worker in self.cuts.holders[shard] else _common(spans[shard], tied)

        parts = [(shard, owner, worker, wanted(shard, worker)) for shard, owner in enumerate(owners)
                 for worker in peers if worker != owner]
        exchange(groups.stage, peers, groups.me, SHARD_SLICES, [
            (shard, owner, worker, length_of(own)) for shard, owner, worker, own in parts if own],
            read=lambda shard, worker: read_spans(result, wanted(shard, worker)),
            write=lambda shard, values: write_spans(result, wanted(shard, groups.me), values),
            like=result)


def exchange(comm: Comm, peers: Sequence[Worker], me: Worker, tags: Tags,
             moves: Sequence[tuple[int, Worker, Worker, int]], *, read: Callable[[int, Worker], torch.Tensor],
             write: Callable[[int, torch.Tensor], None], like: torch.Tensor) -> None:
    """Send numbers of shards between ``peers``, all at once; everybody gives the same ``moves``.

    Args:
        moves: (shard, giver, taker, length).
        read: gives what this worker sends of a shard to a taker; `write` gets what has arrived of one.
        like: has the type and the device of what travels.
    """
    sending: list[Pending] = []
    arriving: list[tuple[int, torch.Tensor, Pending]] = []
    with comm.batch():
        for shard, giver, taker, length in moves:
            if giver == me:
                sending.append(comm.send(read(shard, taker), peers.index(taker), tags[shard]))
            elif taker == me:
                buffer = torch.empty(length, dtype=like.dtype, device=like.device)
                arriving.append((shard, buffer, comm.receive(buffer, peers.index(giver), tags[shard])))
    for shard, buffer, pending in arriving:
        pending.wait()
        write(shard, buffer)
    for pending in sending:
        pending.wait()


def _span(layout: Layout, tie: Tie) -> Span:
    start = layout.starts[id(tie.parameter)]
    return start, start + tie.parameter.numel()


def _common(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    found = [(max(a, c), min(b, d)) for a, b in one for c, d in other]
    return [(start, end) for start, end in found if start < end]


def length_of(spans: Sequence[Span]) -> int:
    """How many numbers lie in ``spans``."""
    return sum(end - start for start, end in spans)


def read_spans(flat: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """What lies there; a view where that is one range."""
    parts = [flat[start:end] for start, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else flat[:0]


def write_spans(flat: torch.Tensor, spans: Sequence[Span], values: torch.Tensor) -> None:
    """Put ``values`` there, one range after the other."""
    begin = 0
    for start, end in spans:
        flat[start:end] = values[begin:begin + end - start]
        begin += end - start


def sharded(exact: bool, plan: Plan, me: Worker, averaging: Averaging, cuts: Cuts) -> ShardedReduction:
    """How a stage that follows ``plan`` reduces to the holders of its shards."""
    factor = 1.0 if averaging == "tokens" else 1.0 / plan.problem.grid.pipelines
    inner = reduction_of(exact, plan, me, averaging)
    if not exact:
        return ShardedReduction(inner, lambda groups: [
            ((place, 0, 0), WHOLE, worker) for place, worker in enumerate(groups.peers(me.stage))], factor, cuts)
    logical = [(piece, piece, worker) for piece, worker in sorted(
        (piece, worker) for worker, own in pieces(plan, me.stage).items() for piece in own)]
    return ShardedReduction(inner, lambda _: logical, factor, cuts)
