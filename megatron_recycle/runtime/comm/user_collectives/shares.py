"""A reduction that is too large to be exchanged whole: each member adds up a share, and sends that to the others.

It proceeds in rounds: so it takes memory for its result and two rounds, whatever the number of members, and each byte
travels twice. One member adds up each element, over all positions in order: the sums have a full exchange's bits,
whatever the membership. Nothing is written to the script's tensors here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from megatron_recycle.runtime.comm.comm import Comm, Pending, wait_all
from megatron_recycle.runtime.comm.user_collectives.calls import Add, Tensors
from megatron_recycle.runtime.comm.user_collectives.packing import buffer, packed, unpacked

_ROUND = 2**23
"""Bytes of a reduction in one round."""


class Members(NamedTuple):
    """Participants of a reduction, by rank among all living workers.

    Attributes:
        owners: living members of the group; each adds up a share.
        outside: other workers that send in place of lost members.
        answers: by position in the group, the sender.
        wanted: owners that want the result. If there are none, nothing is exchanged.
    """

    owners: Sequence[int]
    outside: Sequence[int]
    answers: Sequence[int]
    wanted: Sequence[int]


class Span(NamedTuple):
    """Elements from ``start`` to ``end`` of a tensor."""

    tensor: int
    start: int
    end: int


class Shares:
    """One process's part in one attempt at a reduction.

    Args:
        tensors: its inputs.
        members: the same for all.
        comm: of all living workers.
        tag: of all transfers here.
    """

    def __init__(self, tensors: Tensors, members: Members, comm: Comm, tag: int) -> None:
        self._flat = [tensor.detach().reshape(-1) for tensor in tensors]
        self._members, self._comm, self._tag = members, comm, tag

    def give(self) -> list[Pending]:
        """Send from outside of the group. Does not wait: keep the returned handles. Raises GenerationOver."""
        return [self._send(self._own(spans, owner), owner)
                for spans in self._rounds() for owner in self._members.owners]

    def add(self, add: Add) -> Tensors:
        """Send, and add up; returns the results, flat and in CPU memory, empty where they are not wanted. Raises
        GenerationOver."""
        me, members = self._comm.rank, self._members
        wanted = me in members.wanted
        results = [torch.empty(flat.numel() if wanted else 0, dtype=flat.dtype) for flat in self._flat]
        before: list[Pending] = []
        others: dict[int, tuple[Sequence[Span], Pending]] = {}
        for spans in self._rounds():
            share = self._spans(spans, me)
            own = self._own(spans, me)
            # Before waiting for the last round's sums: so no member waits for the slowest one twice in a round.
            given = {process: self._receive(own, process) for process in (*members.owners, *members.outside)
                     if process != me}
            sent = [self._send(self._own(spans, owner), owner) for owner in members.owners if owner != me]
            _take(results, others)
            total = self._sums(own, given, add)
            if wanted:
                _write(results, share, total)
            wait_all([*before, *sent])
            data = packed(total)
            before = [self._comm.send(data, owner, self._tag) for owner in members.wanted if owner != me]
            others = {owner: (self._spans(spans, owner), self._receive(self._own(spans, owner), owner))
                      for owner in members.owners if owner != me} if wanted else {}
        _take(results, others)
        wait_all(before)
        return results

    def _sums(self, own: Tensors, given: Mapping[int, Pending], add: Add) -> Tensors:
        """This process's share of a round, added up."""
        like = [tensor.cpu() for tensor in own]
        found = {self._comm.rank: like}
        for process, pending in given.items():
            pending.wait()
            found[process] = list(unpacked(pending.tensor, like))
        return [add([found[process][index] for process in self._members.answers]) for index in range(len(own))]

    def _rounds(self) -> Iterator[list[Span]]:
        return rounds(self._flat, _ROUND) if self._members.wanted else iter(())

    def _spans(self, spans: Sequence[Span], owner: int) -> Sequence[Span]:
        """The share of ``owner`` in each of ``spans``."""
        number, count = self._members.owners.index(owner), len(self._members.owners)
        return [Span(tensor, start + (end - start) * number // count, start + (end - start) * (number + 1) // count)
                for tensor, start, end in spans]

    def _own(self, spans: Sequence[Span], owner: int) -> Tensors:
        """This process's inputs for the share of ``owner``."""
        return [self._flat[tensor][start:end] for tensor, start, end in self._spans(spans, owner)]

    def _send(self, tensors: Tensors, process: int) -> Pending:
        return self._comm.send(packed(tensors), process, self._tag)

    def _receive(self, like: Tensors, process: int) -> Pending:
        return self._comm.receive(buffer(like), process, self._tag)


def rounds(tensors: Tensors, limit: int) -> Iterator[list[Span]]:
    """All elements of ``tensors``, in their order, in rounds of less than ``limit`` bytes and one element."""
    spans: list[Span] = []
    left = limit
    for index, tensor in enumerate(tensors):
        start, width = 0, tensor.element_size()
        while start < tensor.numel():
            end = min(tensor.numel(), start + max(1, left // width))
            spans.append(Span(index, start, end))
            left -= (end - start) * width
            start = end
            if left < width:
                yield spans
                spans, left = [], limit
    if spans:
        yield spans


def _take(results: Tensors, others: Mapping[int, tuple[Sequence[Span], Pending]]) -> None:
    """Write the others' sums."""
    for spans, pending in others.values():
        pending.wait()
        like = [results[span.tensor][span.start:span.end] for span in spans]
        _write(results, spans, unpacked(pending.tensor, like))


def _write(results: Tensors, spans: Sequence[Span], values: Tensors) -> None:
    for (tensor, start, end), value in zip(spans, values, strict=True):
        results[tensor][start:end] = value
