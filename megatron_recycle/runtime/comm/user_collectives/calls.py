"""torch's collectives as values: each member's inputs for the others, and its results from theirs.

A call reads its inputs each time it is asked for them, and writes its results only at its end: so it can be given up
and repeated as often as need be. Positions are ranks in the group, empty ones included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_recycle.runtime.comm.user_collectives.packing import Tensors, size

LARGE = 2**20
"""Bytes up to which a reduction is exchanged at once."""


class Call:
    """A barrier; subclasses are the other collectives.

    Attributes:
        what: torch's name of it.
        source: the only position whose tensors are needed; None: all positions.
        sink: the only position that gets results; None: all positions.
        by_itself: whether no peer can answer for the source.
        measured: whether the length of others' tensors is unknown in advance.
        by_shares: whether the reduction is so large that each member adds up a share of it (`shares`).
        alike: whether all members that get results get the same.
    """

    what = "barrier"
    by_itself = measured = by_shares = False
    alike = True

    def __init__(self, source: int | None = None, sink: int | None = None, tensors: Tensors = ()) -> None:
        self.source, self.sink = source, sink
        self._tensors = tensors

    def gives(self, to: int) -> Tensors:
        """The tensors for position ``to``."""
        return self._tensors

    def expects(self, source: int) -> Tensors:
        """Tensors of the size of those that come from position ``source``."""
        return self.gives(source)

    def take(self, given: Sequence[Tensors]) -> None:
        """Write the results. ``given``: the received tensors, by position; none from positions that are no source. Not
        called where this member is no sink."""

    def results(self) -> Tensors | None:
        """The results after `take`, if all members have the same; None: each has its own."""
        return self._tensors if self.alike and self.sink is None else None

    def recall(self, results: Tensors) -> None:
        """Write another member's `results` of the same call."""
        for tensor, known in zip(self.results() or (), results, strict=True):
            tensor.copy_(known.view(tensor.shape))


class AllReduce(Call):
    """``all_reduce``; with a ``sink``, ``reduce``. ``add`` reduces all positions' tensors to one."""

    what = "all_reduce"

    def __init__(self, tensors: Tensors, add: Add, sink: int | None = None) -> None:
        super().__init__(sink=sink, tensors=tensors)
        self.add = add
        self.by_shares = size(tensors) > LARGE
        if sink is not None:
            self.what = "reduce"

    def take(self, given: Sequence[Tensors]) -> None:
        for index, tensor in enumerate(self._tensors):
            tensor.copy_(self.add([tensors[index] for tensors in given]))

    def put(self, results: Tensors) -> None:
        """Write results that were added up by shares: one flat tensor for each of the call's."""
        for tensor, result in zip(self._tensors, results, strict=True):
            tensor.copy_(result.view(tensor.shape))


class Broadcast(Call):
    """``broadcast``."""

    what = "broadcast"

    def __init__(self, tensors: Tensors, root: int) -> None:
        super().__init__(source=root, tensors=tensors)
        self._root = root

    def take(self, given: Sequence[Tensors]) -> None:
        for tensor, brought in zip(self._tensors, given[self._root]):
            tensor.copy_(brought)


class AllGather(Call):
    """``all_gather``; with a ``sink``, ``gather``. ``outputs``: for each input, a tensor for each position."""

    what = "all_gather"

    def __init__(self, outputs: Sequence[Tensors], inputs: Tensors, sink: int | None = None) -> None:
        super().__init__(sink=sink, tensors=inputs)
        self._outputs = outputs
        if sink is not None:
            self.what = "gather"

    def take(self, given: Sequence[Tensors]) -> None:
        for index, slots in enumerate(self._outputs):
            for slot, tensors in zip(slots, given, strict=True):
                slot.copy_(tensors[index].view(slot.shape))

    def results(self) -> Tensors | None:
        return [slot for slots in self._outputs for slot in slots] if self.sink is None else None


class Scatter(Call):
    """``scatter``; ``inputs``: on the root, a tensor for each position."""

    what = "scatter"
    by_itself, alike = True, False

    def __init__(self, output: torch.Tensor, inputs: Tensors, root: int) -> None:
        super().__init__(source=root)
        self._output, self._inputs, self._root = output, inputs, root

    def gives(self, to: int) -> Tensors:
        return [self._inputs[to]] if self._inputs else []

    def expects(self, source: int) -> Tensors:
        return [self._output]

    def take(self, given: Sequence[Tensors]) -> None:
        for tensor in given[self._root]:
            self._output.copy_(tensor)


class ReduceScatter(Call):
    """``reduce_scatter``; ``inputs``: for each output, a tensor for each position."""

    what = "reduce_scatter"
    alike = False

    def __init__(self, outputs: Tensors, inputs: Sequence[Tensors], add: Add) -> None:
        super().__init__()
        self._outputs, self._inputs, self._add = outputs, inputs, add

    def gives(self, to: int) -> Tensors:
        return [pieces[to] for pieces in self._inputs]

    def expects(self, source: int) -> Tensors:
        return self._outputs

    def take(self, given: Sequence[Tensors]) -> None:
        for index, output in enumerate(self._outputs):
            output.copy_(self._add([tensors[index] for tensors in given]).view(output.shape))


class AllToAll(Call):
    """``all_to_all``: a tensor from each position, and one for each."""

    what = "all_to_all"
    alike = False

    def __init__(self, outputs: Tensors, inputs: Tensors) -> None:
        super().__init__()
        self._outputs, self._inputs = outputs, inputs

    def gives(self, to: int) -> Tensors:
        return [self._inputs[to]]

    def expects(self, source: int) -> Tensors:
        return [self._outputs[source]]

    def take(self, given: Sequence[Tensors]) -> None:
        for output, (tensor,) in zip(self._outputs, given, strict=True):
            output.copy_(tensor.view(output.shape))


class Given(Call):
    """A snapshot of the inputs of ``call``, to give again later, when its tensors may have changed.

    Args:
        size: the number of positions.
    """

    def __init__(self, call: Call, size: int) -> None:
        super().__init__(call.source, call.sink)
        self.what, self.by_itself, self.measured = call.what, call.by_itself, call.measured
        self.by_shares = call.by_shares
        given = [list(call.gives(position)) for position in range(size)]
        known = {id(tensor): tensor.detach().clone() for tensors in given for tensor in tensors}
        self._given = [[known[id(tensor)] for tensor in tensors] for tensors in given]

    def gives(self, to: int) -> Tensors:
        return self._given[to]


class Objects(Call):
    """``broadcast_object_list``, ``all_gather_object``, ``gather_object`` and ``scatter_object_list``: bytes.

    Args:
        own: this member's objects, one for all or, by position, one for each.

    Attributes:
        found: the received objects, by position; empty before `take`.
    """

    measured = True

    def __init__(self, what: str, own: bytes | Sequence[bytes], source: int | None = None,
                 sink: int | None = None) -> None:
        super().__init__(source, sink)
        self.what, self.by_itself = what, not isinstance(own, bytes)
        self.found: list[bytes] = []
        self._own = [_bytes(each) for each in ([own] if isinstance(own, bytes) else own)]

    def gives(self, to: int) -> Tensors:
        return self._own[to:to + 1] if self.by_itself else self._own

    def take(self, given: Sequence[Tensors]) -> None:
        self.found = [b"".join(tensor.numpy().tobytes() for tensor in tensors) for tensors in given]

    def results(self) -> Tensors | None:
        return None if self.by_itself or self.sink is not None else [_bytes(each) for each in self.found]

    def recall(self, results: Tensors) -> None:
        self.found = [tensor.numpy().tobytes() for tensor in results]


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


Add = Callable[[Tensors], torch.Tensor]


def adding(operation: dist.ReduceOp | dist.ReduceOp.RedOpType) -> Add | None:
    """The function that reduces many tensors to one, in the order of positions, so that all members have the same bits;
    None if there is none for torch's ``operation``."""
    for known, fold in _FOLDS.items():
        if operation == known:
            return fold
    return None


def _folding(step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Add:
    def fold(tensors: Tensors) -> torch.Tensor:
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total = step(total, tensor)
        return total

    return fold


_SUM = _folding(torch.add)


def _mean(tensors: Tensors) -> torch.Tensor:
    total = _SUM(tensors)
    return total / len(tensors) if total.is_floating_point() or total.is_complex() else total // len(tensors)


_FOLDS: Mapping[dist.ReduceOp.RedOpType, Add] = {
    dist.ReduceOp.SUM: _SUM, dist.ReduceOp.AVG: _mean, dist.ReduceOp.PRODUCT: _folding(torch.mul),
    dist.ReduceOp.MIN: _folding(torch.minimum), dist.ReduceOp.MAX: _folding(torch.maximum),
    dist.ReduceOp.BAND: _folding(torch.bitwise_and), dist.ReduceOp.BOR: _folding(torch.bitwise_or),
    dist.ReduceOp.BXOR: _folding(torch.bitwise_xor),
}
