"""Shards of ZeRO-1 from checkpoints with another cut: for another number of pipelines, or without shards.

Stock lays the parameters of a group end to end, pads them, and gives each rank an equal piece; masters and moments lie
alike. So the content of a shard lies in one file, or in a few consecutive ones.

Universal checkpoints (`ds_to_universal`) have a folder for each parameter, independent of the job's cut. Stock's reader
fills the fragment of a parameter in a rank's partition. Here it gets the whole parameter, from which every shard takes
its pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import FP32_WEIGHT_KEY, PARAM_GROUPS
from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state
from deepspeed.utils.tensor_fragment import fragment_address
from torch import nn

from megatron_recycle.errors import RecycleError, UnsupportedError
from megatron_recycle.runtime.compute.sharded_optimizer import Slot, piece_of

BASE, MASTERS = "base_optimizer_state", "single_partition_of_fp32_groups"
"""Keys in stock's state of a rank: the optimizer's own state, and its masters."""

State = Mapping[str, Any]


def recut(read: Callable[[int], State], before: int, shard: int, count: int, numels: Sequence[int]) -> dict[str, Any]:
    """Stock's state of rank ``shard`` of ``count``.

    Args:
        read: gives the state of one of the ``before`` ranks that have written the checkpoint.
        numels: by parameter group, the number of elements without padding.

    Raises UnsupportedError.
    """
    old = {number: read(number) for number in _overlapping(before, shard, count, numels)}
    any_ = next(iter(old.values()))
    if not all(isinstance(state[BASE], Mapping) for state in old.values()):
        raise UnsupportedError("this checkpoint was written with zero_optimization.elastic_checkpoint, which is not "
                               "supported yet: load it without the plugin, and save with it off")

    def flat(numel: int, of_rank: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The shard's part of a group of ``numel`` numbers, from each old rank's part."""
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
    """An optimizer's state of a slot, by key; bitsandbytes' `state_dict` nests some of it in a dictionary."""
    return {inner: each for key, value in state.items() for inner, each in (
        value.items() if isinstance(value, Mapping) else [(key, value)])}


def _common(old: int, before: int, new: int, after: int, numel: int) -> tuple[int, int]:
    """The range of a group's ``numel`` numbers that is in piece ``old`` of ``before``, and in ``new`` of ``after``."""
    one, other = piece_of(numel, before), piece_of(numel, after)
    return max(old * one, new * other), min((old + 1) * one, (new + 1) * other, numel)


def _overlapping(before: int, shard: int, count: int, numels: Sequence[int]) -> list[int]:
    """The checkpoint's ranks that overlap with ``shard``; at least one, for the values that are not cut."""
    found = [number for number in range(before)
             if any(low < high for low, high in (_common(number, before, shard, count, numel) for numel in numels))]
    return found or [before - 1]


# ---- universal checkpoints


@dataclass
class Whole:
    """A parameter's whole state: master, optimizer state (flat, by key), and step."""

    master: torch.Tensor
    optim_fragment: dict[str, torch.Tensor] = field(default_factory=dict)
    step: Any = None

    @property
    def lp_fragment_address(self) -> fragment_address:
        """The wanted range of the parameter, for stock's reader: all of it."""
        return fragment_address(numel=self.master.numel(), start=0)

    def get_hp_fragment(self) -> torch.Tensor:
        """The tensor that stock's reader fills with the master."""
        return self.master


def read_universal(checkpoint: str) -> Mapping[str, Any]:
    """A checkpoint's optimizer state that belongs to no parameter. Raises RecycleError."""
    path = Path(checkpoint, "zero", "optimizer_state.pt")
    if not path.is_file():
        raise RecycleError(f"{path} is missing, which a universal checkpoint has: convert again (ds_to_universal), or "
                           "leave checkpoint.load_universal out")
    found: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return found


def read_parameter(checkpoint: str, name: str, parameter: nn.Parameter, part: int, parts: int) -> Whole:
    """The state of one parameter, which is tensor-parallel part ``part`` of ``parts``. Raises RecycleError, and stock's
    errors for other shapes."""
    folder = Path(checkpoint, "zero", name)
    if not (folder / f"{FP32_WEIGHT_KEY}.pt").is_file():
        raise RecycleError(f"the universal checkpoint has no parameter {name} (no {folder}/{FP32_WEIGHT_KEY}.pt): it "
                           "is of another model, or was not converted to its end")
    found: Any = Whole(torch.zeros(parameter.numel()))
    stand_in: Any = _StandIn(parameter)
    stand_in._hp_mapping = found
    found.step = load_hp_checkpoint_state(stand_in, str(folder), part, parts)
    return found


def shards_of(slots: Mapping[int, Sequence[Slot]], parameters: Sequence[nn.Parameter], groups: Any,
           read: Callable[[nn.Parameter], Whole]) -> dict[int, dict[str, Any]]:
    """By shard of ``slots``, the optimizer's state in the form of stock's ZeRO-1; ``groups``: the optimizer's settings.
    ``read`` loads ``parameters`` one at a time, since a host may lack memory for all of them."""
    masters = {shard: [torch.zeros(slot.size) for slot in each] for shard, each in slots.items()}
    states: dict[int, dict[int, dict[str, Any]]] = {
        shard: {number: {} for number in range(len(each))} for shard, each in slots.items()}
    pieces = [(shard, number, slot.size, piece) for shard, each in slots.items() for number, slot in enumerate(each)
              for piece in slot.pieces]
    for parameter in parameters:
        whole = read(parameter)
        for shard, number, size, piece in pieces:
            if piece.parameter is not parameter:
                continue
            own, end = slice(piece.start, piece.end), piece.offset + piece.end - piece.start
            state = states[shard][number]
            masters[shard][number][piece.offset:end] = whole.master[own]
            for key, values in whole.optim_fragment.items():
                state.setdefault(key, torch.zeros(size, dtype=values.dtype))[piece.offset:end] = values[own]
            if whole.step is not None:
                state["step"] = whole.step
    return {shard: {BASE: {"state": states[shard], PARAM_GROUPS: groups}, MASTERS: masters[shard]} for shard in slots}


class _StandIn:
    """Acts as the parameter for stock's reader, which would set attributes on the model's own."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)
