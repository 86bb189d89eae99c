"""A copy of a stage's state from before its last step, to undo that step exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_recycle.runtime.compute.sharded_optimizer import ShardedOptimizer
from megatron_recycle.runtime.stage import Stage


class Undo:
    """One snapshot of parameters, optimizer state and counters, in buffers that are kept and written again.

    Costs once the bytes of parameters and optimizer state. Where these are cut into shards, once the bytes of the
    shards that this worker holds: parameters follow from them, its own at once, and others when they are gathered.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._spare: dict[str, torch.Tensor] = {}
        self._counters: Any = None
        self._numbers: dict[int, Any] = {}

    def save(self) -> None:
        """Save the state, in place of the last saved one."""
        shards = self._stage.shards
        state = self._stage.state() if shards is None else _of_shards(shards)
        self._spare = {name: self._spare[name] if name in self._spare else torch.empty_like(tensor)
                       for name, tensor in state.items()}
        _copy(state, self._spare)
        self._counters = self._stage.counters()
        self._numbers = {} if shards is None else {shard: shards.numbers(shard) for shard in shards.held}

    def restore(self) -> None:
        """Restore the saved state."""
        shards = self._stage.shards
        if shards is None:
            self._stage.reset_state(self._spare.keys())
            _copy(self._spare, self._stage.state())
        else:
            for shard, numbers in self._numbers.items():
                own = {name.partition(" ")[2]: tensor for name, tensor in self._spare.items()
                       if name.startswith(f"{shard} ")}
                shards.restore(shard, own, numbers)
        self._stage.set_counters(self._counters)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._spare.values())


def _of_shards(shards: ShardedOptimizer) -> dict[str, torch.Tensor]:
    return {f"{shard} {name}": tensor for shard in shards.held for name, tensor in shards.tensors(shard).items()}


def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    if not source:  # a stage without parameters
        return
    with torch.no_grad():
        torch._foreach_copy_([target[name] for name in source], list(source.values()))
