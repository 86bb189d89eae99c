"""Reduction where a stage's optimizer state is sharded: each holder gets only its shards' slices of the gradient.

Raw pieces go to the first holder of each shard, which folds them in logical order and sends the result to the shard's
other holders, as `ExactReduction` does with slices for all peers. With `fast` a piece is a worker's whole sum, and
workers are folded in order. No worker has the whole gradient afterwards, except, while it is summed, that of a
parameter that stages share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import torch

from megatron_recycle.plan import Piece, Plan, Worker, pieces
from megatron_recycle.runtime.comm.comm import Comm, Pending, wait_all
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.reduction import Reduction, fold, reduction_of
from megatron_recycle.runtime.comm.tags import PIECES, SHARD_SLICES, SHARD_TIES, Tags
from megatron_recycle.runtime.comm.tied_gradients import fold_ties, pipelines_alike
from megatron_recycle.runtime.compute.accumulate import WHOLE, Accumulators, Layout
from megatron_recycle.runtime.stage import Averaging, Tie

Span = tuple[int, int]
Logical = Sequence[tuple[int, Piece, Piece, Worker]]
"""Sums in logical order: each sum's number in the stage, its piece, its key in the keeper's accumulators, and the
keeper."""

_AT_ONCE = 2**23
_SHARE = 32
"""Bytes in flight at a time; for large stages, this share of the gradient's size."""


def at_once(layout: Layout) -> int:
    """Bytes of gradient pieces that a worker receives at a time, and at most as many that it sends."""
    return max(_AT_ONCE, layout.numel * layout.dtype.itemsize // _SHARE)


@dataclass(frozen=True)
class Cuts:
    """A stage's shards in one generation.

    Attributes:
        holders: by shard, the workers that hold it; the first one reduces it.
        spans: ranges of a shard in a flat gradient of a layout.
        wire: the type in which gradients travel and are added up with the fast reduction; None: that of the sums.
    """

    holders: tuple[tuple[Worker, ...], ...]
    spans: Callable[[int, Layout], Sequence[Span]]
    wire: torch.dtype | None = None

    def of(self, worker: Worker) -> list[int]:
        """Shards that ``worker`` holds."""
        return [shard for shard, holders in enumerate(self.holders) if worker in holders]

    def spoken_for(self, worker: Worker) -> list[int]:
        """Shards that ``worker`` reduces, as their first holder."""
        return [shard for shard, holders in enumerate(self.holders) if holders[0] == worker]


class _Part(NamedTuple):
    """Transfers under way of one part of each shard. The part starts at element ``begin``; ``spans`` are its ranges in
    a flat gradient, by shard; ``arriving`` is by piece and shard."""

    begin: int
    spans: Mapping[int, Sequence[Span]]
    sending: Sequence[Pending]
    arriving: dict[tuple[int, int], Pending]


class ShardedReduction:
    """`Reduction` for the holders of shards. The resulting gradient is *packed*: this worker's shards one after the
    other, the parts of parameters in each end to end.

    Args:
        inner: gives each micro-batch's place, and the losses.
        pieces: all workers' sums in logical order, for each chunk of the stage that is summed apart.
        before: factor of each worker's sum, before it is added up.
        after: factor of the total.
        cuts: the shards and their holders.
        exact: whether the bits must not depend on the membership. Then no sum is rounded or multiplied on its way: the
            number of sums would matter.
    """

    def __init__(self, inner: Reduction, pieces: Callable[[Groups], Sequence[Logical]],
                 before: float, after: float, cuts: Cuts, exact: bool) -> None:
        self.apart = inner if exact else None
        """The reduction by which sums of chunks are kept apart; None: they are not."""
        self._pieces = pieces
        self._before, self._after = before, after
        self.keeps_sums = exact
        self._wire = None if exact else cuts.wire
        self.cuts = cuts
        self.place = inner.place
        self.losses = inner.losses
        self.mean_loss = inner.mean_loss

    def gradient(self, sums: Accumulators, groups: Groups, ties: Sequence[Tie] = ()) -> torch.Tensor:
        me, layout, cuts = groups.me, sums.layout, self.cuts
        each = self._pieces(groups)
        first = set() if self.keeps_sums else {tie.number for tie in ties if tie.first and pipelines_alike(tie, groups)}
        spans = [cuts.spans(shard, layout) for shard in range(len(cuts.holders))]
        found: dict[int, torch.Tensor] = {}
        seen: set[int] = set()
        for chunk, logical in enumerate(each):
            own = sums.of(chunk)
            mine = {number: own.sum(kept) for number, _, kept, worker in logical if worker == me}
            for flat in mine.values():  # one, except with `exact`
                fold_ties([tie for tie in ties if tie.number in first], layout, flat, groups)
                if self._before != 1.0:
                    flat.mul_(self._before)
            if len(each) == 1:
                found = self._fold(mine, logical, spans, groups, layout)
            else:
                met = _in_chunk(spans, layout, own.layout, seen)
                of_chunk = [[inside for _, inside, _ in of_shard] for of_shard in met]
                _join(found, spans, met, self._fold(mine, logical, of_chunk, groups, layout))
            mine.clear()
            if not self.keeps_sums:
                own.clear()
        self._share(found, spans, groups, layout)
        self._fold_ties([tie for tie in ties if tie.number not in first], found, spans, groups, layout)
        held = [shard for shard in cuts.of(me) if spans[shard]]
        begin, packed = 0, torch.empty(sum(found[shard].numel() for shard in held), dtype=layout.dtype,
                                       device=layout.device)
        for shard in held:
            values = found.pop(shard)
            packed[begin:begin + values.numel()] = values
            begin += values.numel()
        return packed

    def _fold(self, mine: Mapping[int, torch.Tensor], logical: Logical,
              spans: Sequence[Sequence[Span]], groups: Groups, layout: Layout) -> dict[int, torch.Tensor]:
        """Reduce this worker's own shards: one part of each shard after the other, so that little memory is in flight,
        and transfers overlap with adding up the part before."""
        wire, filled = self._wire or layout.dtype, [shard for shard, each in enumerate(spans) if each]
        owners = [holders[0] for holders in self.cuts.holders]
        most = max((owners.count(owner) for owner in owners), default=1)
        numel = max(1, at_once(layout) // (2 * wire.itemsize * len(logical) * most))
        parts = {shard: _parts(spans[shard], numel) for shard in filled}
        found = {shard: torch.empty(length_of(spans[shard]), dtype=wire, device=layout.device)
                 for shard in filled if owners[shard] == groups.me}
        under_way: deque[_Part] = deque()
        for turn in range(max(map(len, parts.values()), default=0)):
            now = {shard: each[turn] for shard, each in parts.items() if turn < len(each)}
            under_way.append(_Part(turn * numel, now, *self._begin(now, mine, logical, owners, wire, groups, layout)))
            if len(under_way) == 2:
                self._end(under_way.popleft(), mine, logical, found, groups.me)
        for last in under_way:
            self._end(last, mine, logical, found, groups.me)
        return found

    def _begin(self, now: Mapping[int, Sequence[Span]], mine: Mapping[int, torch.Tensor],
               logical: Logical, owners: Sequence[Worker], wire: torch.dtype,
               groups: Groups, layout: Layout) -> tuple[list[Pending], dict[tuple[int, int], Pending]]:
        """Start the transfers of a part of each shard."""
        me, stage, peers, shards = groups.me, groups.stage, groups.peers(groups.me.stage), len(owners)
        sending: list[Pending] = []
        arriving: dict[tuple[int, int], Pending] = {}
        # Peers send to each other both ways: a library that runs postings one after the other needs a batch.
        with stage.batch():
            for number, _, _, worker in logical:
                for shard, spans in now.items():
                    tag = PIECES[number * shards + shard]
                    if worker == me != owners[shard]:
                        part = read_spans(mine[number], spans).to(wire)
                        sending.append(stage.send(part, peers.index(owners[shard]), tag))
                    elif owners[shard] == me != worker:
                        buffer = torch.empty(length_of(spans), dtype=wire, device=layout.device)
                        arriving[number, shard] = stage.receive(buffer, peers.index(worker), tag)
        return sending, arriving

    def _end(self, part: _Part, mine: Mapping[int, torch.Tensor], logical: Logical,
             found: Mapping[int, torch.Tensor], me: Worker) -> None:
        """Add up the arrived part of each shard."""
        for shard, spans in part.spans.items():
            if shard not in found:
                continue
            addends = []
            for number, piece, _, worker in logical:
                if worker == me:
                    addends.append((piece, read_spans(mine[number], spans).to(found[shard].dtype)))
                else:
                    pending = part.arriving.pop((number, shard))
                    pending.wait()
                    addends.append((piece, pending.tensor))
            total = fold(addends).mul_(self._after)
            found[shard][part.begin:part.begin + total.numel()] = total
        wait_all(part.sending)

    def _share(self, found: dict[int, torch.Tensor], spans: Sequence[Sequence[Span]], groups: Groups,
               layout: Layout) -> None:
        """Each shard's first holder sends it to the other holders."""
        exchange(groups.stage, groups.peers(groups.me.stage), groups.me, SHARD_SLICES, [
            (shard, holders[0], holder, length_of(spans[shard])) for shard, holders in enumerate(self.cuts.holders)
            for holder in holders[1:] if spans[shard]],
            read=lambda shard, _: found[shard], write=found.__setitem__,
            like=torch.empty(0, dtype=self._wire or layout.dtype, device=layout.device))

    def _fold_ties(self, ties: Sequence[Tie], found: dict[int, torch.Tensor], spans: Sequence[Sequence[Span]],
                   groups: Groups, layout: Layout) -> None:
        """Add up the stages' gradients of parameters that they share. All peers take part, each with the whole gradient
        of such a parameter, so that any can give it to another stage's."""
        own = Layout([tie.parameter for tie in ties if tie.parameter in layout], layout.dtype)
        if not own.numel:
            fold_ties(ties, own, torch.empty(0, device=layout.device), groups)  # refuses partly trained ties
            return
        whole, wire = torch.empty(own.numel, dtype=layout.dtype, device=layout.device), self._wire or layout.dtype
        tied = [(layout.starts[id(parameter)], own.starts[id(parameter)], parameter.numel())
                for parameter in own.parameters]
        met = [overlaps(of_shard, tied) for of_shard in spans]

        def read(shard: int) -> torch.Tensor:
            return read_spans(found[shard], [inside for inside, _ in met[shard]])

        def write(shard: int, values: torch.Tensor) -> None:
            write_spans(whole, [tied_span for _, tied_span in met[shard]], values)

        for shard in found:
            if met[shard]:
                write(shard, read(shard))
        peers = groups.peers(groups.me.stage)
        exchange(groups.stage, peers, groups.me, SHARD_TIES, [
            (shard, holders[0], peer, length_of([tied_span for _, tied_span in met[shard]]))
            for shard, holders in enumerate(self.cuts.holders) for peer in peers
            if peer not in holders and met[shard]],
            read=lambda shard, _: read(shard), write=write, like=torch.empty(0, dtype=wire, device=layout.device))
        fold_ties(ties, own, whole, groups)
        for shard in found:
            if met[shard]:
                found[shard] = found[shard].to(layout.dtype)  # the sum over stages is not sent any more
                write_spans(found[shard], [inside for inside, _ in met[shard]],
                            read_spans(whole, [tied_span for _, tied_span in met[shard]]))


def exchange(comm: Comm, peers: Sequence[Worker], me: Worker, tags: Tags,
             moves: Sequence[tuple[int, Worker, Worker, int]], *, read: Callable[[int, Worker], torch.Tensor],
             write: Callable[[int, torch.Tensor], None], like: torch.Tensor) -> None:
    """Send parts of shards between ``peers``, all at once; all peers give the same ``moves``.

    Args:
        moves: (shard, giver, taker, length).
        read: gives this worker's part of a shard for a taker; `write` gets the arrived part of a shard.
        like: a tensor of the type and device of the transfers.
    """
    sending: list[Pending] = []
    arriving: list[tuple[int, Pending]] = []
    with comm.batch():
        for shard, giver, taker, length in moves:
            if giver == me:
                sending.append(comm.send(read(shard, taker), peers.index(taker), tags[shard]))
            elif taker == me:
                buffer = torch.empty(length, dtype=like.dtype, device=like.device)
                arriving.append((shard, comm.receive(buffer, peers.index(giver), tags[shard])))
    for shard, pending in arriving:
        pending.wait()
        write(shard, pending.tensor)
    wait_all(sending)


def _in_chunk(spans: Sequence[Sequence[Span]], layout: Layout, chunk: Layout,
              seen: set[int]) -> list[list[tuple[Span, Span, bool]]]:
    """By shard, the elements that its slice and a chunk's gradient have in common: the range in the slice, the range in
    the chunk's ``layout``, and whether an earlier chunk has them as well. ``seen``: the earlier chunks' parameters."""
    found: list[tuple[int, int, int, bool]] = []
    starts, starts_inside = layout.starts, chunk.starts
    for parameter in chunk.parameters:
        at, inside, again = starts[id(parameter)], starts_inside[id(parameter)], id(parameter) in seen
        seen.add(id(parameter))
        if found and found[-1][0] + found[-1][2] == at and found[-1][3] == again:  # merge neighbours
            found[-1] = *found[-1][:2], found[-1][2] + parameter.numel(), again
        else:
            found.append((at, inside, parameter.numel(), again))
    return [[(slice_span, chunk_span, again) for at, inside, length, again in found
             for slice_span, chunk_span in overlaps(of_shard, [(at, inside, length)])] for of_shard in spans]


def _join(found: dict[int, torch.Tensor], spans: Sequence[Sequence[Span]],
          met: Sequence[Sequence[tuple[Span, Span, bool]]], of_chunk: Mapping[int, torch.Tensor]) -> None:
    """Copy a chunk's contributions to shards to their places in ``found``. ``met``: as `_in_chunk`; ``of_chunk`` has
    its ranges in the chunk one after the other."""
    for shard, values in of_chunk.items():
        if shard not in found:
            found[shard] = torch.empty(length_of(spans[shard]), dtype=values.dtype, device=values.device)
        begin = 0
        for (start, end), _, again in met[shard]:
            part = values[begin:begin + end - start]
            found[shard][start:end] = found[shard][start:end] + part if again else part
            begin += end - start


def overlaps(spans: Sequence[Span], tied: Sequence[tuple[int, int, int]]) -> list[tuple[Span, Span]]:
    """Elements that a shard's slice and the tied gradients have in common: the range in the slice, packed, and the
    range in the tied ones.

    Args:
        spans: of the shard, in the layout.
        tied: each parameter's start in the layout, its start among the tied ones, and its length.
    """
    found, begin = [], 0
    for start, end in spans:
        for first, among, length in tied:
            low, high = max(start, first), min(end, first + length)
            if low < high:
                found.append(((begin + low - start, begin + high - start),
                              (among + low - first, among + high - first)))
        begin += end - start
    return found


def _parts(spans: Sequence[Span], numel: int) -> list[list[Span]]:
    """``spans`` in parts of ``numel`` elements each; the last may have fewer."""
    found: list[list[Span]] = []
    room = 0
    for start, end in spans:
        while start < end:
            if not room:
                found.append([])
                room = numel
            step = min(room, end - start)
            found[-1].append((start, start + step))
            start, room = start + step, room - step
    return found


def length_of(spans: Sequence[Span]) -> int:
    """The number of elements in ``spans``."""
    return sum(end - start for start, end in spans)


def read_spans(flat: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """The elements of ``spans``; a view if that is one range."""
    parts = [flat[start:end] for start, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else flat[:0]


def write_spans(flat: torch.Tensor, spans: Sequence[Span], values: torch.Tensor) -> None:
    """Write ``values`` to ``spans``, one range after the other."""
    begin = 0
    for start, end in spans:
        flat[start:end] = values[begin:begin + end - start]
        begin += end - start


def sharded(exact: bool, plan: Plan, me: Worker, averaging: Averaging, cuts: Cuts) -> ShardedReduction:
    """The reduction of a stage that follows ``plan``, to the holders of its shards."""
    mean = 1.0 if averaging == "tokens" else 1.0 / plan.problem.grid.pipelines
    factors = (mean, 1.0) if averaging == "before" and not exact else (1.0, mean)
    inner = reduction_of(exact, plan, me, averaging)
    if not exact:
        def by_worker(groups: Groups) -> list[Logical]:
            return [[(place, (place, 0, 0), WHOLE, worker) for place, worker in enumerate(groups.peers(me.stage))]]

        return ShardedReduction(inner, by_worker, *factors, cuts, False)
    numbers = count()
    logical = [[(next(numbers), piece, piece, worker) for piece, worker in sorted(
        (piece, worker) for worker, own in pieces(plan, chunk).items() for piece in own)]
        for chunk in plan.problem.chunks_of[me.stage]]
    return ShardedReduction(inner, lambda _: logical, *factors, cuts, True)
