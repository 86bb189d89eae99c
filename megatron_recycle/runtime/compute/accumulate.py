"""Gradients summed over micro-batches, in flat buffers, in a fixed order.

``fast`` keeps one sum per worker. ``exact`` keeps one per *piece*: an unbroken run of a pipeline's blocks
(plan.pieces), so that the reduction can fold all pieces of a stage in logical order, whatever the route (promise P3). A
piece's first contribution is copied, not added to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import nn
from torch._utils import _unflatten_dense_tensors

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.plan import Piece
from megatron_recycle.runtime.compute.split import AddTo, Contribution

WHOLE: Piece = (-1, 0, 0)
"""The one piece of ``fast``: everything this worker computed."""


class Layout:
    """Offsets of the parameters' gradients in a flat buffer: in the parameters' order, without gaps.

    ``dtype`` is the buffer's; None: the parameters' own.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None = None) -> None:
        self.parameters = tuple(parameters)
        kinds = {(dtype or parameter.dtype, parameter.device) for parameter in self.parameters}
        if len(kinds) > 1:
            raise UnsupportedError(f"parameters of one stage differ in dtype or device: {sorted(map(str, kinds))}; "
                                   "keep them the same")
        self.dtype, self.device = kinds.pop() if kinds else (dtype or torch.float32, torch.device("cpu"))
        ends = list(accumulate(parameter.numel() for parameter in self.parameters))
        self.numel = ends[-1] if ends else 0
        self.sums_in_place = all((getattr(parameter, "grad_dtype", None) or parameter.dtype) == self.dtype
                                 for parameter in self.parameters)
        """Whether autograd can add to sums: they have the type of its gradients."""
        # By identity, here and below: a tensor's own hash is a function call in Python.
        self._range = {id(parameter): (end - parameter.numel(), end)
                       for parameter, end in zip(self.parameters, ends)}

    @property
    def starts(self) -> Mapping[int, int]:
        """The start of each parameter, by its `id`."""
        return {number: start for number, (start, _) in self._range.items()}

    def empty(self) -> torch.Tensor:
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def views(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Every parameter's part of a flat buffer, in the parameters' order."""
        return _unflatten_dense_tensors(flat, self.parameters)

    def by_chunk(self, modules: Sequence[nn.Module]) -> Sequence[Layout]:
        """A layout for each of ``modules``, the stage's chunks: first the parameters that no earlier chunk has, in this
        layout's order, then those that one has (tied embeddings)."""
        found, seen = [], set[int]()
        for module in modules:
            own = {id(parameter) for parameter in module.parameters()}
            mine = [parameter for parameter in self.parameters if id(parameter) in own]
            found.append(Layout(sorted(mine, key=lambda parameter: id(parameter) in seen), self.dtype))
            seen |= own
        new = [id(parameter) for place, each in enumerate(found) for parameter in each.parameters
               if not any(parameter in before for before in found[:place])]
        if new != list(map(id, self.parameters)):
            raise AssertionError("the parameters of a stage lie one chunk behind the other, and each is of one chunk")
        return found

    def joined(self, gradients: Sequence[tuple[Layout, torch.Tensor]]) -> torch.Tensor:
        """The flat gradient of the stage, from those of its chunks (`by_chunk`); a parameter of several chunks gets
        their sum, in their order."""
        parts: list[torch.Tensor] = []
        again: list[tuple[nn.Parameter, torch.Tensor]] = []
        for place, (layout, flat) in enumerate(gradients):
            shared = [parameter for parameter in layout.parameters
                      if any(parameter in before for before, _ in gradients[:place])]
            again += [(parameter, layout.view(flat, parameter)) for parameter in shared]
            parts.append(flat[:layout.numel - sum(parameter.numel() for parameter in shared)])
        result = torch.cat(parts)
        for parameter, gradient in again:
            self.view(result, parameter).add_(gradient)
        return result

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._range

    def view(self, flat: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        start, end = self._range[id(parameter)]
        return flat[start:end].view_as(parameter)


class Accumulator:
    """The sum of one piece: its blocks' sums, added in order.

    A block is summed apart before it joins the blocks ahead of it, as if it had run on another worker. Each parameter
    keeps its own place: some get their gradients in B, some in W.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._ahead = _Sum(layout)
        self._block = _Sum(layout)
        self._block_of: dict[int, int] = {}

    def add(self, block: int, contributions: Iterable[Contribution]) -> None:
        """Add one micro-batch's gradients; micro-batches of a piece come in order."""
        for parameter, gradient in contributions:
            if self._block_of.setdefault(id(parameter), block) != block:
                if parameter in self._block:  # else a reduction that has failed since has added it already
                    self._ahead.add(parameter, self._block.take(parameter))
                self._block_of[id(parameter)] = block
            self._block.add(parameter, gradient)

    def take(self, parameter: nn.Parameter) -> tuple[int, torch.Tensor] | None:
        """The last block with a gradient of ``parameter``, and its sum, which starts anew; None: there is no such sum.
        Valid until the next addition."""
        return (self._block_of[id(parameter)], self._block.take(parameter)) if parameter in self._block else None

    def copy(self) -> Accumulator:
        """A copy of the sums, in its own memory."""
        found = Accumulator(self._layout)
        found._ahead, found._block, found._block_of = self._ahead.copy(), self._block.copy(), {**self._block_of}
        return found

    def running(self, block: int) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Parameters, and their sums, to which another gradient of ``block`` can be added in place."""
        return [(parameter, self._block.at(parameter)) for parameter in self._block.parameters()
                if self._block_of[id(parameter)] == block]

    def sum(self) -> torch.Tensor:
        """The flat sum, (numel,); zero where no micro-batch gave a gradient. Afterwards only further blocks can be
        added."""
        if not self._ahead.parameters():
            return self._block.complete()
        for parameter in self._block.parameters():
            self._ahead.add(parameter, self._block.take(parameter))
        return self._ahead.complete()


class _Sum:
    """A flat buffer of sums; the first addend of each parameter is copied, not added to zero."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._flat: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}
        """Each parameter's part of the buffer: a view costs as much as an addition."""
        self._views: dict[int, torch.Tensor] = {}
        """The parts that have a sum."""

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._views

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that have a sum."""
        return [parameter for parameter in self._layout.parameters if id(parameter) in self._views]

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor | AddTo) -> None:
        view = self._views.get(id(parameter))
        if view is not None:
            if isinstance(gradient, torch.Tensor):
                view.add_(gradient)
            else:
                gradient(view)
            return
        self._make()
        view = self._views[id(parameter)] = self._parts[id(parameter)]
        if isinstance(gradient, torch.Tensor):
            view.copy_(gradient)
        else:
            gradient(view.zero_())

    def copy(self) -> _Sum:
        """A copy of the sums, in its own memory."""
        found = _Sum(self._layout)
        for parameter in self.parameters():
            found.add(parameter, self.at(parameter))
        return found

    def at(self, parameter: nn.Parameter) -> torch.Tensor:
        """This parameter's sum."""
        return self._views[id(parameter)]

    def take(self, parameter: nn.Parameter) -> torch.Tensor:
        """This parameter's sum, which starts anew; valid until the next addition."""
        return self._views.pop(id(parameter))

    def complete(self) -> torch.Tensor:
        flat = self._make()
        for number, part in self._parts.items():
            if number not in self._views:
                part.zero_()
        return flat

    def _make(self) -> torch.Tensor:
        if self._flat is None:
            self._flat = self._layout.empty()
            self._parts = {id(parameter): part for parameter, part in
                           zip(self._layout.parameters, self._layout.views(self._flat), strict=True)}
        return self._flat


class Accumulators:
    """All sums of one worker in one attempt at an iteration.

    ``place`` gives a micro-batch's piece on this worker and its block.
    """

    def __init__(self, layout: Layout, place: Callable[[int, int], tuple[Piece, int]]) -> None:
        self.layout = layout
        self._place = place
        self._sums: dict[tuple[int, int], Accumulator] = {}
        """By pipeline and first block: at most one piece of a worker begins there."""

    def of(self, chunk: int) -> Accumulators:
        """The sums for the gradients of a chunk of the stage."""
        return self

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters whose gradients are summed up."""
        return self.layout.parameters

    def add(self, pipeline: int, microbatch: int, contributions: Iterable[Contribution]) -> None:
        """Add one micro-batch's gradients; micro-batches of a piece come in order."""
        piece, block = self._place(pipeline, microbatch)
        if piece[:2] not in self._sums:
            self._sums[piece[:2]] = Accumulator(self.layout)
        self._sums[piece[:2]].add(block, contributions)

    @contextmanager
    def lent(self, pipeline: int, microbatch: int) -> Iterator[None]:
        """Inside the block autograd itself adds this micro-batch's gradients to existing sums.

        Outside of the block every gradient is left on its parameter. Inside, a parameter keeps its gradient only if it
        has no sum yet, has a gradient already, has hooks on the accumulated gradient, or has another memory layout than
        its sum.
        """
        piece, block = self._place(pipeline, microbatch)
        running = self._sums[piece[:2]].running(block) if piece[:2] in self._sums else []
        lent = [(parameter, sum_) for parameter, sum_ in running
                if parameter.grad is None and not parameter._post_accumulate_grad_hooks and parameter.is_contiguous()]
        try:
            for parameter, sum_ in lent:
                parameter.grad = sum_
            yield
        finally:
            for parameter, sum_ in lent:
                grown, parameter.grad = parameter.grad, None
                if grown is not None and grown is not sum_:  # a graph of gradients was requested, or a hook replaced it
                    sum_.copy_(grown.detach())

    def running(self, piece: Piece) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """The parameters that have a sum in ``piece``, which is a single block, and those sums."""
        return self._sums[piece[:2]].running(piece[2]) if piece[:2] in self._sums else []

    def copy(self) -> Accumulators:
        """A copy of the sums, in its own memory."""
        found = Accumulators(self.layout, self._place)
        found._sums = {key: each.copy() for key, each in self._sums.items()}
        return found

    def take_over(self, sums: Mapping[tuple[int, int], Accumulator], parameters: Iterable[nn.Parameter]) -> None:
        """Go on with the last blocks of ``parameters`` that are in ``sums``."""
        for (pipeline, _), each in sums.items():
            for parameter in parameters:
                if (taken := each.take(parameter)) is not None:
                    block, values = taken
                    own = self._sums.setdefault((pipeline, block), Accumulator(self.layout))
                    own.add(block, [(parameter, values)])

    def laid_out(self, layout: Layout) -> Accumulators:
        """The same sums, with room for more parameters if ``layout`` has more. The sums are of single blocks."""
        if list(map(id, layout.parameters)) == list(map(id, self.layout.parameters)):
            return self
        found = Accumulators(layout, self._place)
        for (pipeline, first), each in self._sums.items():
            block = max(0, first)
            found._sums[pipeline, first] = moved = Accumulator(layout)
            moved.add(block, each.running(block))
        return found

    def regroup(self, other: Accumulators) -> None:
        """Go on with the pieces of ``other``, which is empty and of another plan. A piece that this worker goes on with
        begins with the same block, and may end with another one."""
        self._place = other._place

    def clear(self) -> None:
        """Drop all sums: they are reduced."""
        self._sums.clear()

    def sum(self, piece: Piece) -> torch.Tensor:
        """The flat sum of ``piece``; zeros if nothing was added to it."""
        return self._sums.setdefault(piece[:2], Accumulator(self.layout)).sum()


class ChunkedAccumulators(Accumulators):
    """The sums of a worker whose stage's chunks are summed apart, each as a stage of its own would be.

    Args:
        layout: of the whole gradient: one chunk after the other.
        each: of the chunks, in order.
    """

    def __init__(self, layout: Layout, each: Sequence[Accumulators]) -> None:
        self.layout = layout
        self._each = tuple(each)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        found = {id(parameter): parameter for sums in self._each for parameter in sums.parameters}
        return tuple(found.values())

    def of(self, chunk: int) -> Accumulators:
        return self._each[chunk]

    def each(self, change: Callable[[Accumulators], Accumulators]) -> ChunkedAccumulators:
        """The sums of all chunks, changed."""
        return ChunkedAccumulators(self.layout, list(map(change, self._each)))

    def regroup(self, other: Accumulators) -> None:
        for chunk, sums in enumerate(self._each):
            sums.regroup(other.of(chunk))

    def clear(self) -> None:
        for sums in self._each:
            sums.clear()


class Copies(Accumulators):
    """Copies of ``sums``, for a reduction in place that may have to be repeated."""

    def __init__(self, sums: Accumulators) -> None:
        self.layout = sums.layout
        self._whole = sums

    def of(self, chunk: int) -> Accumulators:
        return Copies(self._whole.of(chunk))

    def clear(self) -> None:
        """Keeps the sums: they may be reduced again."""

    def sum(self, piece: Piece) -> torch.Tensor:
        return self._whole.sum(piece).clone()
