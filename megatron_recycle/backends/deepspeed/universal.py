"""Universal checkpoints (`ds_to_universal`), which have a folder for each parameter, whatever the job was cut into.

Stock's reader fills the fragment of a parameter that lies in a rank's partition. Here it is given the parameter as a
whole, of which every shard takes its pieces.
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

from megatron_recycle.backends.deepspeed.recut import BASE, MASTERS
from megatron_recycle.errors import RecycleError
from megatron_recycle.runtime.compute.sharded_optimizer import Slot


@dataclass
class Whole:
    """A parameter's numbers: its master, and what the optimizer keeps of each, flat, by key; and its step."""

    master: torch.Tensor
    optim_fragment: dict[str, torch.Tensor] = field(default_factory=dict)
    step: Any = None

    @property
    def lp_fragment_address(self) -> fragment_address:
        """Which of the parameter's numbers are wanted, for stock's reader."""
        return fragment_address(numel=self.master.numel(), start=0)

    def get_hp_fragment(self) -> torch.Tensor:
        """Where stock's reader puts the master."""
        return self.master


def read_global(checkpoint: str) -> Mapping[str, Any]:
    """What a checkpoint has of the optimizer as a whole. Raises RecycleError."""
    path = Path(checkpoint, "zero", "optimizer_state.pt")
    if not path.is_file():
        raise RecycleError(f"{path} is missing, which a universal checkpoint has: convert again (ds_to_universal), or "
                           "leave checkpoint.load_universal out")
    found: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return found


def read(checkpoint: str, name: str, parameter: nn.Parameter, part: int, parts: int) -> Whole:
    """One parameter, of which this is tensor-parallel part ``part`` of ``parts``. Raises RecycleError, and what stock
    does where shapes are others."""
    folder = Path(checkpoint, "zero", name)
    if not (folder / f"{FP32_WEIGHT_KEY}.pt").is_file():
        raise RecycleError(f"the universal checkpoint has no parameter {name} (no {folder}/{FP32_WEIGHT_KEY}.pt): it "
                           "is of another model, or was not converted to its end")
    found: Any = Whole(torch.zeros(parameter.numel()))
    stand_in: Any = _StandIn(parameter)
    stand_in._hp_mapping = found
    found.step = load_hp_checkpoint_state(stand_in, str(folder), part, parts)
    return found


def shards(slots: Mapping[int, Sequence[Slot]], parameters: Sequence[nn.Parameter], groups: Any,
           read: Callable[[nn.Parameter], Whole]) -> dict[int, dict[str, Any]]:
    """By shard of ``slots``, the optimizer's state as stock's ZeRO-1 writes it; ``groups``: the optimizer's settings.
    ``read`` gives each of ``parameters``, which take turns, since all of them may be more than a host has room for."""
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
    """What stock's reader asks of a parameter, so that nothing is hung on the model's own."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)
