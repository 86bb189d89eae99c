"""Shards of a ZeRO-1 checkpoint that another number of pipelines has written, cut anew.

Stock lays the parameters of a group end to end, pads them, and gives each rank an equal piece; masters and moments lie
alike. So what a shard is to have lies in one file, or in a few that follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.compute.sharded_optimizer import piece_of

BASE, MASTERS = "base_optimizer_state", "single_partition_of_fp32_groups"
"""Where stock's state of a rank has the optimizer's own, and its masters."""

State = Mapping[str, Any]


def recut(read: Callable[[int], State], before: int, shard: int, count: int, numels: Sequence[int]) -> dict[str, Any]:
    """Stock's state of rank ``shard`` of ``count``.

    Args:
        read: gives the state of one of the ``before`` ranks that have written the checkpoint.
        numels: by parameter group, how many numbers there are without padding.

    Raises UnsupportedError.
    """
    old = {number: read(number) for number in _overlapping(before, shard, count, numels)}
    any_ = next(iter(old.values()))
    if not all(isinstance(state[BASE], Mapping) for state in old.values()):
        raise UnsupportedError("this checkpoint was written with zero_optimization.elastic_checkpoint, which is not "
                               "supported yet: load it without the plugin, and save with it off")

    def flat(numel: int, of_rank: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The shard's part of a group of ``numel`` numbers, of what each old rank has of that."""
        size, each = piece_of(numel, count), piece_of(numel, before)
        found = torch.zeros(size, dtype=next(iter(of_rank.values())).dtype)
        for number, values in of_rank.items():
            low, high = _common(number, before, shard, count, numel)
            if low < high:
                found[low - shard * size:high - shard * size] = values[low - number * each:high - number * each]
        return found

    states = {}
    old = {number: {**state, BASE: {**state[BASE], "state": {
        group: unwrapped(own) for group, own in state[BASE]["state"].items()}}} for number, state in old.items()}
    for group, own in old[next(iter(old))][BASE]["state"].items():
        if in_blocks := [key for key, value in own.items() if isinstance(value, torch.Tensor) and value.dim()
                         and value.numel() != piece_of(numels[group], before)]:
            raise UnsupportedError(f"the checkpoint's optimizer state is of blocks ({', '.join(in_blocks)}), which "
                                   f"other shards cut elsewhere: go on with {before} pipelines, as it was written, or "
                                   "load it with load_optimizer_states=False")
        states[group] = {key: flat(numels[group], {number: state[BASE]["state"][group][key]
                                                   for number, state in old.items()})
                         if isinstance(value, torch.Tensor) and value.dim() else value for key, value in own.items()}
    masters = [flat(numel, {number: state[MASTERS][group] for number, state in old.items()})
               for group, numel in enumerate(numels)]
    return {**any_, BASE: {**any_[BASE], "state": states}, MASTERS: masters}


def unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer keeps of a slot, by key; bitsandbytes' `state_dict` has some of it in a dictionary of its
    own."""
    return {inner: each for key, value in state.items() for inner, each in (
        value.items() if isinstance(value, Mapping) else [(key, value)])}


def _common(old: int, before: int, new: int, after: int, numel: int) -> tuple[int, int]:
    """The range of a group's ``numel`` numbers that is in piece ``old`` of ``before``, and in ``new`` of ``after``."""
    one, other = piece_of(numel, before), piece_of(numel, after)
    return max(old * one, new * other), min((old + 1) * one, (new + 1) * other, numel)


def _overlapping(before: int, shard: int, count: int, numels: Sequence[int]) -> list[int]:
    """The ranks of the checkpoint that have something of ``shard``; one of them at least, whose numbers it gets."""
    found = [number for number in range(before)
             if any(low < high for low, high in (_common(number, before, shard, count, numel) for numel in numels))]
    return found or [before - 1]
