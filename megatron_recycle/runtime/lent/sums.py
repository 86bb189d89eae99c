"""Sums of gradients on a worker that borrows layers, or lends some.

Sums of borrowed layers are kept apart, for their lender. With the exact reduction a worker also keeps its own sums of
layers that it lends apart, block by block, until the helpers' have arrived: then all blocks are added up in order, each
as if it had been run at home.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from megatron_recycle.plan import Microbatch, Piece
from megatron_recycle.runtime.compute.accumulate import WHOLE, Accumulators, Layout
from megatron_recycle.runtime.compute.split import Contribution

Place = Callable[[int, int], tuple[Piece, int]]
End = tuple[int, bool]
"""One of the worker's chunks, counted through the model, and whether its copies are of the chunk behind it."""


class LentAccumulators(Accumulators):
    """All sums of one worker in one attempt at an iteration whose plan lends layers.

    Args:
        layout: of the own gradients.
        place: as `Accumulators`'.
        block: micro-batches of a block whose sums are kept apart; 0: one sum is enough.
        borrowed: layouts of the copies of layers.
        given: own parameters whose gradients others compute too.
    """

    def __init__(self, layout: Layout, place: Place, block: int, borrowed: Mapping[End, Layout],
                 given: Sequence[nn.Parameter]) -> None:
        super().__init__(layout, place)
        self._block = block
        self._apart = apart = functools.partial(_apart, block)  # not a method: a cycle would keep the sums alive
        self.borrowed = {end: Accumulators(each, apart) for end, each in borrowed.items()}
        self._given = Accumulators(Layout([each for each in given if each in layout], layout.dtype), apart)
        self._of = self._apart_by_parameter()
        self._run: dict[Piece, Microbatch] = {}
        """The blocks that this worker has run in part or whole, each with one of its micro-batches."""

    def _apart_by_parameter(self) -> Mapping[int, Accumulators]:
        own = {id(parameter): self._given for parameter in self._given.layout.parameters} if self._block else {}
        return {**own, **{id(parameter): sums for sums in self.borrowed.values()
                          for parameter in sums.layout.parameters}}

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return (*super().parameters, *(
            parameter for sums in self.borrowed.values() for parameter in sums.layout.parameters))

    def add(self, pipeline: int, microbatch: int, contributions: Iterable[Contribution]) -> None:
        self._run.setdefault(self._apart(pipeline, microbatch)[0], (pipeline, microbatch))
        # One by one, as they are formed.
        for contribution in contributions:
            sums = self._of.get(id(contribution[0]))
            if sums is None:
                super().add(pipeline, microbatch, [contribution])
            else:
                sums.add(pipeline, microbatch, [contribution])

    @contextmanager
    def lent(self, pipeline: int, microbatch: int) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(super().lent(pipeline, microbatch))
            for sums in (*self.borrowed.values(), self._given):
                stack.enter_context(sums.lent(pipeline, microbatch))
            yield

    def regroup(self, other: Accumulators) -> None:
        """As `Accumulators.regroup`. The worker may lend and borrow more layers of the same chunks than before."""
        super().regroup(other)
        assert isinstance(other, LentAccumulators)
        more = [each for each in other._given.layout.parameters if each not in self._given.layout]
        if more:
            given = Layout([*self._given.layout.parameters, *more], self._given.layout.dtype)
            self._given = self._given.laid_out(given)
        if self._block:  # the next gradients of an unfinished block go there, too
            self._given.take_over(self._sums, more)
        self.borrowed = {end: self.borrowed[end].laid_out(sums.layout) if end in self.borrowed else sums
                         for end, sums in other.borrowed.items()}
        self._of = self._apart_by_parameter()

    def joined(self, come: Mapping[Piece, Sequence[tuple[nn.Parameter, torch.Tensor]]]) -> Accumulators:
        """This worker's own sums joined with those that have ``come`` from helpers, by piece, in the order of blocks.
        All these sums stay as they are: if the reduction fails, they are joined again."""
        found = self.copy()
        if not self._block:
            for values in come.values():
                found.add(-1, 0, [each for each in values if each[0] in self.layout])
            return found
        for piece, (pipeline, microbatch) in sorted(self._run.items()):
            own = self._given.running(piece)
            theirs = [each for each in come.get(piece, ()) if each[0] in self.layout]
            found.add(pipeline, microbatch, [*own, *theirs])
        return found

    def clear(self) -> None:
        super().clear()
        for sums in self.borrowed.values():
            sums.clear()


def _apart(size: int, pipeline: int, microbatch: int) -> tuple[Piece, int]:
    """As `Accumulators`' place: a sum for each block of ``size`` micro-batches, or one for all."""
    if not size:
        return WHOLE, 0
    block = microbatch // size
    return (pipeline, block, block), block
