"""Megatron's process groups once workers may be missing.

The collectives of Megatron's training loop over the groups of `parallel_state` (sums of losses, maxima over stages,
barriers of timers) would wait for dead workers for ever once training has begun. The runtime has exchanged those
numbers already, so the groups are replaced by one whose only member is this worker: the loop's own calls stay, and give
back what they are given. Sizes and ranks that the loop computes samples with stay nominal.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, timers
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.rendezvous import new_group
from megatron_recycle.runtime.place import Place

_TIMEOUT_SECONDS = 600.0
"""A checkpoint may take long; that a worker is gone is found otherwise."""
_CONNECT_SECONDS = 60.0
_SHARED = ("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_CP", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
           "_MODEL_PARALLEL_GROUP")
_OF_PEERS = ("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_CP", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
             "_EXPERT_DATA_PARALLEL_GROUP")


def detach(place: Place, speaks: Callable[[], bool]) -> None:
    """Make Megatron's own collectives end at this worker; called once, before training. ``speaks`` tells whether this
    worker writes the log."""
    state: Any = parallel_state
    state._MPU_DATA_PARALLEL_WORLD_SIZE = parallel_state.get_data_parallel_world_size()
    state._MPU_DATA_PARALLEL_RANK = parallel_state.get_data_parallel_rank()
    _use(dict.fromkeys(_SHARED, _alone(place)))
    _detach_timers(speaks)


@contextmanager
def of_those_left(groups: Groups) -> Iterator[None]:
    """Inside the block ``groups`` are Megatron's for data parallelism: this worker's rank there is its place among the
    peers that are left. They end with their generation."""
    state: Any = parallel_state
    peers = groups.stage_control
    inside: dict[str, Any] = {**dict.fromkeys(_OF_PEERS, peers.group), "_MPU_DATA_PARALLEL_WORLD_SIZE": peers.size,
                              "_MPU_DATA_PARALLEL_RANK": peers.rank}
    before = {name: getattr(state, name) for name in inside}
    _use(inside)
    try:
        yield
    finally:
        _use(before)


class TensorGroup:
    """The group that a worker's tensor-parallel parts compute in, wherever ``model`` and Megatron keep it.

    An aborted group is of no use any more, so each generation has another.
    """

    def __init__(self, model: nn.Module) -> None:
        group = parallel_state.get_tensor_model_parallel_group()
        state: Any = parallel_state
        self._holders: list[tuple[Any, str]] = [(state, "_TENSOR_MODEL_PARALLEL_GROUP")]
        for module in model.modules():
            holders = [module, *(value for value in vars(module).values() if isinstance(value, ProcessGroupCollection))]
            self._holders += [(holder, name) for holder in holders for name, value in vars(holder).items()
                              if value is group]

    def use(self, group: dist.ProcessGroup) -> None:
        for holder, name in self._holders:
            setattr(holder, name, group)


def _use(groups: Mapping[str, Any]) -> None:
    for name, group in groups.items():
        setattr(parallel_state, name, group)


def _alone(place: Place) -> dist.ProcessGroup:
    name = f"recycle/alone/{uuid.uuid4().hex}"
    return new_group(name, [dist.get_rank()], dist.HashStore(), backend=place.backend, timeout=60.0,
                     connect_timeout=60.0)


def _detach_timers(speaks: Callable[[], bool]) -> None:
    """Timers neither wait for other ranks nor gather from them: the log shows the times of the rank that writes it."""
    timer: Any = timers.Timer
    start, stop = timer.start, timer.stop
    group: Any = timers.Timers
    log = group.log

    def alone(self: Any, names: Any, reset: bool, barrier: bool) -> torch.Tensor:
        times = torch.zeros(dist.get_world_size(), len(names))  # as from all ranks; 0: never ran
        times[dist.get_rank()] = torch.tensor([
            self._timers[name].elapsed(reset=reset) if name in self._timers else 0.0 for name in names])
        return times

    def log_here(self: Any, names: Any, rank: int | None = None, **options: Any) -> None:
        log(self, names, (dist.get_rank() if speaks() else -1) if rank is None else rank, **options)

    timer.start = lambda self, barrier=False: start(self)
    timer.stop = lambda self, barrier=False: stop(self)
    group._get_elapsed_time_all_ranks = alone
    group.log = log_here
