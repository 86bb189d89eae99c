"""Parameters of a universal checkpoint of DeepSpeed (`ds_to_universal`), whole: shards take what lies in them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state
from deepspeed.utils.tensor_fragment import fragment_address
from torch import nn

from megatron_recycle.errors import UnsupportedError

MASTER = "fp32"


class UniversalCheckpoint:
    """The one in ``folder``, as part ``rank`` of ``size`` tensor-parallel parts reads it."""

    def __init__(self, folder: str, rank: int, size: int) -> None:
        self._folder, self._rank, self._size = os.path.join(folder, "zero"), rank, size
        self._known: dict[int, tuple[Mapping[str, torch.Tensor], Any]] = {}

    def common(self) -> Mapping[str, Any]:
        """What it has beside parameters: settings of groups, the loss's scale."""
        found: dict[str, Any] = torch.load(os.path.join(self._folder, "optimizer_state.pt"), weights_only=False)
        return found

    def of(self, parameter: nn.Parameter, name: str) -> tuple[Mapping[str, torch.Tensor], Any]:
        """The fp32 copy of ``parameter`` and the optimizer's state of it by key, each flat, and its number of steps
        (None: there is none); they are cut by DeepSpeed's own function.

        Raises UnsupportedError if the checkpoint has no parameter of this ``name``.
        """
        if id(parameter) not in self._known:
            place = os.path.join(self._folder, name)
            if not os.path.isdir(place):
                raise UnsupportedError(f"the universal checkpoint has no {place}: it is of another model, or "
                                       "parameters have other names")
            whole = torch.empty(parameter.numel())
            reader: Any = SimpleNamespace(shape=parameter.shape, numel=parameter.numel)
            reader._hp_mapping = SimpleNamespace(
                lp_fragment_address=fragment_address(start=0, numel=parameter.numel()),
                get_hp_fragment=lambda: whole, optim_fragment={})
            steps = load_hp_checkpoint_state(reader, place, self._rank, self._size)
            self._known[id(parameter)] = {MASTER: whole, **reader._hp_mapping.optim_fragment}, steps
        return self._known[id(parameter)]
