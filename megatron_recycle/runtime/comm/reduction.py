"""Reduction of one stage's gradients over its live workers.

Both ways divide by the nominal number of pipelines, never by the number of survivors (promise P2), at the place where
the framework does (``Averaging``).

``fast`` is one all-reduce per bucket of each worker's single sum, in the frameworks' own bucket order. Without failures
it gives stock DeepSpeed's bits: a tied parameter is summed over its stages first, then over pipelines, unless these
stages have lost workers of different pipelines. ``exact`` sends raw pieces to an owner per slice; the owner folds them
in logical order (blocks of a pipeline in order, then pipelines in order) and sends the result around, so that the bits
depend neither on the route nor on the number of survivors (promise P3). It uses no all-reduce: gloo's order of
summation depends on the number of members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from megatron_recycle.plan import Piece, Plan, Worker, pieces
from megatron_recycle.runtime.comm.comm import Comm, wait_all
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.tags import PIECES, SLICES
from megatron_recycle.runtime.comm.tied_gradients import fold_ties, pipelines_alike
from megatron_recycle.runtime.compute.accumulate import WHOLE, Accumulators, ChunkedAccumulators, Layout
from megatron_recycle.runtime.stage import Averaging, Tie

_BUCKET_NUMEL = 500_000_000  # DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE; the bucket layout decides gloo's order of sums

Room = Callable[[int, Layout, Callable[[int, int], tuple[Piece, int]]], Accumulators]
"""Makes accumulators for a chunk of the stage, given its gradients' layout and their reduction's `Reduction.place`."""


class Reduction(Protocol):
    """Reduction of a stage's gradients and losses over its peers.

    Attributes:
        keeps_sums: whether `gradient` leaves the sums unchanged, so that it can be called again.
    """

    keeps_sums: bool

    def place(self, pipeline: int, microbatch: int) -> tuple[Piece, int]:
        """The sum that a micro-batch's gradient belongs to on this worker, and its block there."""

    def gradient(self, sums: Accumulators, groups: Groups, ties: Sequence[Tie] = ()) -> torch.Tensor:
        """The stage's reduced gradient, flat, the same bits on every peer; for ``ties`` it is the sum over all their
        stages. Raises GenerationOver, UnsupportedError."""

    def losses(self, losses: Mapping[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        """This last-stage worker's addend of a vector whose sum over its peers gives the mean loss."""

    def mean_loss(self, total: torch.Tensor) -> float:
        """Mean loss of the global batch from that sum."""


class FastReduction:
    """All-reduce among peers; equal up to rounding whatever the membership.

    Args:
        pipelines: nominal number of pipelines.
        microbatches: nominal micro-batches of a pipeline.
        averaging: where the framework divides by the number of pipelines.
    """

    keeps_sums = False

    def __init__(self, pipelines: int, microbatches: int, averaging: Averaging = "after") -> None:
        self._pipelines = pipelines
        self._microbatches = microbatches
        self._averaging = averaging

    def place(self, pipeline: int, microbatch: int) -> tuple[Piece, int]:
        return WHOLE, 0

    def gradient(self, sums: Accumulators, groups: Groups, ties: Sequence[Tie] = ()) -> torch.Tensor:
        flat = sums.sum(WHOLE)
        # Tie by tie: all of a tie's stages must decide alike, and do not know each other's further ties.
        stages_first = {tie.number for tie in ties if tie.first and pipelines_alike(tie, groups)}
        fold_ties([tie for tie in ties if tie.number in stages_first], sums.layout, flat, groups)
        for start, end in _buckets(sums.layout):
            bucket = flat[start:end]
            if self._averaging == "before":
                bucket.mul_(1.0 / self._pipelines)
            groups.stage.sum(bucket).wait()
            if self._averaging == "after":
                bucket.mul_(1.0 / self._pipelines)
        fold_ties([tie for tie in ties if tie.number not in stages_first], sums.layout, flat, groups)
        return flat

    def losses(self, losses: Mapping[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(1)
        for value in losses.values():
            total += value.cpu()
        return total.div_(self._microbatches)

    def mean_loss(self, total: torch.Tensor) -> float:
        return total.div_(self._pipelines).item()


class ExactReduction:
    """Fold of raw pieces in logical order; the same bits whatever the membership.

    Args:
        pipelines: nominal number of pipelines.
        microbatches: nominal micro-batches of each pipeline.
        block: micro-batches per block.
        pieces: each worker's pieces of this stage (``plan.pieces``).
        me: this worker.
        averaging: "tokens" if gradients are not divided by the number of pipelines.
        chunk, chunks: this reduction's chunk of the stage, and how many chunks there are.
    """

    keeps_sums = True

    def __init__(self, pipelines: int, microbatches: Sequence[int], block: int,
                 pieces: Mapping[Worker, Sequence[Piece]], me: Worker, averaging: Averaging = "after",
                 chunk: int = 0, chunks: int = 1) -> None:
        self._pipelines = pipelines
        self._chunk, self._chunks = chunk, chunks
        self._factor = 1.0 if averaging == "tokens" else 1.0 / pipelines
        self._microbatches = tuple(microbatches)
        self._offsets = [sum(self._microbatches[:pipeline]) for pipeline in range(pipelines)]
        self._block = block
        self._mine = tuple(pieces.get(me, ()))
        self._logical = sorted((piece, worker) for worker, own in pieces.items() for piece in own)

    def place(self, pipeline: int, microbatch: int) -> tuple[Piece, int]:
        block = microbatch // self._block
        piece = next(piece for piece in self._mine if piece[0] == pipeline and piece[1] <= block <= piece[2])
        return piece, block

    def gradient(self, sums: Accumulators, groups: Groups, ties: Sequence[Tie] = ()) -> torch.Tensor:
        peers = groups.peers(groups.me.stage)
        slices = _slices(sums.layout.numel, len(peers))
        own = slices[peers.index(groups.me)]
        mine = {number: sums.sum(piece) for number, (piece, worker) in enumerate(self._logical) if worker == groups.me}
        buffers = {number: torch.empty(own[1] - own[0], dtype=sums.layout.dtype, device=sums.layout.device)
                   for number, (_, worker) in enumerate(self._logical) if worker != groups.me}
        # Peers send to each other both ways: a library that runs postings one after the other needs a batch.
        with groups.stage.batch():
            sending = [groups.stage.send(flat[start:end], index, self._tag(number))
                       for number, flat in mine.items()
                       for index, (start, end) in enumerate(slices) if peers[index] != groups.me]
            arriving = {number: groups.stage.receive(buffer, peers.index(self._logical[number][1]), self._tag(number))
                        for number, buffer in buffers.items()}
        ordered = []
        for number, (piece, worker) in enumerate(self._logical):
            if worker == groups.me:
                ordered.append((piece, mine[number][own[0]:own[1]]))
            else:
                arriving[number].wait()
                ordered.append((piece, buffers[number]))
        result = sums.layout.empty()
        result[own[0]:own[1]] = fold(ordered).mul_(self._factor)
        wait_all(sending)
        self._share(result, slices, peers, groups)
        fold_ties(ties, sums.layout, result, groups)
        return result

    def _tag(self, number: int) -> int:
        """Tag of piece ``number``. It is unique to the chunk: peers need not be at the same one."""
        return PIECES[number * self._chunks + self._chunk]

    def _share(self, result: torch.Tensor, slices: Sequence[tuple[int, int]], peers: Sequence[Worker],
               groups: Groups) -> None:
        """Every owner sends its slice of ``result`` to all peers."""
        mine = peers.index(groups.me)
        with groups.stage.batch():
            moving = [groups.stage.receive(result[start:end], index, SLICES[self._chunk])
                      for index, (start, end) in enumerate(slices) if index != mine]
            start, end = slices[mine]
            moving += [groups.stage.send(result[start:end], index, SLICES[self._chunk])
                       for index in range(len(peers)) if index != mine]
        wait_all(moving)

    def losses(self, losses: Mapping[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        # One slot per micro-batch, filled by the one worker that ran it: a sum with zeros is exact in any order.
        values = torch.zeros(sum(self._microbatches), dtype=torch.float64)
        for (pipeline, microbatch), value in losses.items():
            values[self._offsets[pipeline] + microbatch] = value.item()
        return values

    def mean_loss(self, total: torch.Tensor) -> float:
        per_pipeline = [sum(total[offset:offset + count].tolist()) / count
                        for offset, count in zip(self._offsets, self._microbatches) if count]
        return sum(per_pipeline) / self._pipelines


class ChunkedReduction:
    """The reduction of a stage with several chunks, one after the other, each as if it were a stage of its own, so that
    the bits agree. With `exact`, each chunk may deal micro-batches to peers differently; with `fast`, the library's
    order of summation depends on where elements lie in the buffer.

    Args:
        each: of the chunks, in order.
    """

    def __init__(self, each: Sequence[ExactReduction | FastReduction]) -> None:
        self._each = tuple(each)
        self.keeps_sums = each[0].keeps_sums
        self.place = each[0].place
        self.losses = each[0].losses
        self.mean_loss = each[0].mean_loss

    def sums(self, layout: Layout, modules: Sequence[nn.Module], room: Room) -> ChunkedAccumulators:
        """Accumulators for the chunks ``modules``, each made by ``room``."""
        return ChunkedAccumulators(layout, [room(chunk, own, reduction.place) for chunk, (own, reduction) in enumerate(
            zip(layout.by_chunk(modules), self._each, strict=True))])

    def gradient(self, sums: Accumulators, groups: Groups, ties: Sequence[Tie] = ()) -> torch.Tensor:
        each = [sums.of(chunk) for chunk in range(len(self._each))]
        result = sums.layout.joined([(own.layout, reduction.gradient(own, groups))
                                     for own, reduction in zip(each, self._each, strict=True)])
        fold_ties(ties, sums.layout, result, groups)
        return result


def reduction_of(exact: bool, plan: Plan, me: Worker, averaging: Averaging) -> Reduction:
    """The reduction of a stage that follows ``plan``."""
    grid, block, chunks = plan.problem.grid, plan.problem.block, plan.problem.chunks_of[me.stage]
    each: list[ExactReduction | FastReduction]
    if exact:
        each = [ExactReduction(grid.pipelines, grid.microbatches, block, pieces(plan, chunk), me, averaging, place,
                               len(chunks)) for place, chunk in enumerate(chunks)]
    else:
        each = [FastReduction(grid.pipelines, max(grid.microbatches), averaging) for _ in chunks]
    return each[0] if len(each) == 1 else ChunkedReduction(each)


def per_token(gradient: torch.Tensor, tokens: float) -> None:
    """Divide a reduced ``gradient`` by the global batch's number of ``tokens``, in place.

    Megatron's arithmetic: by an integer's reciprocal, on the gradient's device. Zero tokens change nothing.
    """
    if tokens > 0:
        gradient.mul_(1.0 / torch.tensor(int(tokens), dtype=torch.int, device=gradient.device))


def fold(addends: Sequence[tuple[Piece, torch.Tensor]]) -> torch.Tensor:
    """Sum of ``addends``, given in logical order: blocks inside each pipeline first, then pipelines.

    Out of place: no given tensor is changed.
    """
    pipelines: list[torch.Tensor] = []
    current = None
    for (pipeline, _, _), values in addends:
        if pipeline != current:
            pipelines.append(values)
            current = pipeline
        else:
            pipelines[-1] = pipelines[-1] + values
    total = pipelines[0].clone()
    for values in pipelines[1:]:
        total += values
    return total


def count(comm: Comm, *flags: bool) -> list[int]:
    """For each flag, the number of members of ``comm`` that have set it. Blocks until all members call this. Raises
    GenerationOver."""
    counts = torch.tensor(flags, dtype=torch.float64)
    comm.sum(counts).wait()
    return [int(number) for number in counts.tolist()]


def _buckets(layout: Layout) -> list[tuple[int, int]]:
    """DeepSpeed's rule: a bucket is closed by the parameter that takes it over the limit."""
    buckets, start, end = [], 0, 0
    for parameter in layout.parameters:
        end += parameter.numel()
        if end - start > _BUCKET_NUMEL:
            buckets.append((start, end))
            start = end
    return buckets + ([(start, end)] if end > start else [])


def _slices(numel: int, owners: int) -> list[tuple[int, int]]:
    return [(numel * index // owners, numel * (index + 1) // owners) for index in range(owners)]
