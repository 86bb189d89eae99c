"""Calls of torch's process groups, as `distributed_c10d` and scripts make them, read as `Call`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.comm.user_collectives.calls import (
    Add,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Call,
    ReduceScatter,
    Scatter,
    Tensors,
    adding,
)

Read = Callable[[int, Sequence[Any]], Call]
"""(size of the group, arguments) -> the call. Raises UnsupportedError."""


def _tensors(value: Any) -> Tensors:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _lists(value: Any) -> list[Tensors]:
    """A list of lists of tensors; a flat list stands for the only one."""
    return [list(value)] if value and isinstance(value[0], torch.Tensor) else [list(item) for item in value]


def _root(options: Sequence[Any]) -> int:
    for option in options:
        if isinstance(option, int):
            return option
        if hasattr(option, "rootRank"):
            return int(option.rootRank)
    return 0


def _add(options: Sequence[Any]) -> Add:
    named = (getattr(option, "reduceOp", option) for option in options)
    operation = next((each for each in named if isinstance(each, (dist.ReduceOp, dist.ReduceOp.RedOpType))),
                     dist.ReduceOp.SUM)
    found = adding(operation)
    if found is None:
        raise UnsupportedError("a collective of the script between two iterations adds up in a way that only its "
                               "communication library knows (PREMUL_SUM): scale the tensor first, and use SUM")
    return found


def _pieces(tensor: torch.Tensor, count: int, sizes: Sequence[int] = ()) -> Tensors:
    """Contiguous views of ``tensor``: ``count`` equal ones, or with ``sizes`` rows each."""
    if not sizes:
        flat = tensor.view(-1)
        size = flat.numel() // count
        return [flat[index * size:(index + 1) * size] for index in range(count)]
    return torch.split(tensor, list(sizes))


def _barrier(size: int, given: Sequence[Any]) -> Call:
    return Call()


def _all_reduce(size: int, given: Sequence[Any]) -> Call:
    return AllReduce(_tensors(given[0]), _add(given[1:]))


def _reduce(size: int, given: Sequence[Any]) -> Call:
    return AllReduce(_tensors(given[0]), _add(given[1:]), sink=_root(given[1:]))


def _broadcast(size: int, given: Sequence[Any]) -> Call:
    return Broadcast(_tensors(given[0]), _root(given[1:]))


def _all_gather(size: int, given: Sequence[Any]) -> Call:
    return AllGather(_lists(given[0]), _tensors(given[1]))


def _all_gather_single(size: int, given: Sequence[Any]) -> Call:
    return AllGather([_pieces(output, size) for output in _tensors(given[0])], _tensors(given[1]))


def _all_gather_coalesced(size: int, given: Sequence[Any]) -> Call:
    of_ranks = _lists(given[0])  # these are lists of ranks, of lists of tensors
    return AllGather([list(slots) for slots in zip(*of_ranks, strict=True)], _tensors(given[1]))


def _gather(size: int, given: Sequence[Any]) -> Call:
    return AllGather(_lists(given[0]), _tensors(given[1]), sink=_root(given[2:]))


def _scatter(size: int, given: Sequence[Any]) -> Call:
    output, = _tensors(given[0])
    return Scatter(output, [tensor for tensors in _lists(given[1]) for tensor in tensors], _root(given[2:]))


def _reduce_scatter(size: int, given: Sequence[Any]) -> Call:
    return ReduceScatter(_tensors(given[0]), _lists(given[1]), _add(given[2:]))


def _reduce_scatter_single(size: int, given: Sequence[Any]) -> Call:
    return ReduceScatter(_tensors(given[0]), [_pieces(each, size) for each in _tensors(given[1])], _add(given[2:]))


def _all_to_all(size: int, given: Sequence[Any]) -> Call:
    return AllToAll(_tensors(given[0]), _tensors(given[1]))


def _all_to_all_single(size: int, given: Sequence[Any]) -> Call:
    output, own, out_sizes, own_sizes, *_ = (*given, (), ())
    return AllToAll(_pieces(output, size, out_sizes), _pieces(own, size, own_sizes))


METHODS: Mapping[str, Read] = {
    "barrier": _barrier, "monitored_barrier": _barrier, "allreduce": _all_reduce, "allreduce_coalesced": _all_reduce,
    "reduce": _reduce, "broadcast": _broadcast, "allgather": _all_gather, "_allgather_base": _all_gather_single,
    "all_gather_single": _all_gather_single, "all_gather_single_coalesced": _all_gather_single,
    "allgather_into_tensor_coalesced": _all_gather_single, "allgather_coalesced": _all_gather_coalesced,
    "gather": _gather, "scatter": _scatter, "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_single, "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_single,
    "reduce_scatter_single_coalesced": _reduce_scatter_single,
    "alltoall": _all_to_all, "alltoall_base": _all_to_all_single, "all_to_all_single": _all_to_all_single,
}
"""Methods of a process group -> how their arguments are read."""
