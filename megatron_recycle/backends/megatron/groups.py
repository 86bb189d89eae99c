"""Megatron's process groups once workers may be missing.

Between two iterations they are living groups, as all of a script's
(:mod:`megatron_recycle.runtime.comm.user_collectives`). During an iteration the runtime has already exchanged all that
Megatron's loop asks data- and model-parallel groups for (sums of losses, maxima over stages). There the groups are one
whose only member is this worker, so that no stage waits for another: the loop's own calls return their input. Sizes and
ranks stay nominal.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, timers
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron_recycle.backends.megatron.te import quantizers_of
from megatron_recycle.backends.patching import replaced
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.rendezvous import OWN, new_group


def _of(*names: str) -> tuple[str, ...]:
    """These groups of `parallel_state`, with core's further names since 0.19 for groups in which weights are not cut
    once more: `get_data_parallel_group()` returns those."""
    return (*names, *(full for name in names if hasattr(parallel_state, full := f"{name}_WITH_GTP_REMAT")))


_OF_ALL = _of("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_CP", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP")
_SHARED = (*_OF_ALL, "_MODEL_PARALLEL_GROUP")
_OF_PEERS = (*_OF_ALL, *_of("_EXPERT_DATA_PARALLEL_GROUP"))


class Kept:
    """The places of Megatron's data- and model-parallel groups: `parallel_state`, and a collection in each model
    (`pg_collection`), which newer loops read. Made before training, while all groups are nominal.

    Args:
        models: of this worker.
        others: collections of groups that the loop keeps beside them.
    """

    def __init__(self, models: Sequence[nn.Module], others: Iterable[Any] = ()) -> None:
        self._nominal = {name: getattr(parallel_state, name) for name in (*_SHARED, *_OF_PEERS)}
        self._name_of = by_group = {id(group): name for name, group in self._nominal.items() if group is not None}
        kept = [one for model in models for module in model.modules() for one in _collections(module)]
        collections = {id(one): one for one in (*kept, *others)}
        self._collected = [(one, field, by_group[id(group)]) for one in collections.values()
                           for field, group in vars(one).items() if id(group) in by_group]

    def now(self, value: Any) -> Any:
        """Megatron's current group in place of ``value``, if that is one of the nominal groups; otherwise ``value``."""
        name = self._name_of.get(id(value))
        return value if name is None else getattr(parallel_state, name)

    @contextmanager
    def holding(self, group: dist.ProcessGroup, names: Collection[str]) -> Iterator[None]:
        """Inside the block ``group`` is in all of Megatron's places of these ``names``."""
        same = {id(self._nominal[name]) for name in names}
        with ExitStack() as held:
            held.enter_context(replaced(parallel_state, **dict.fromkeys(names, group)))
            for one, field, name in self._collected:
                if id(self._nominal[name]) in same:
                    held.enter_context(replaced(one, **{field: group}))
            yield

    @contextmanager
    def of_those_left(self, groups: Groups) -> Iterator[None]:
        """Inside the block ``groups`` are Megatron's for data parallelism: this worker's rank there is its place among
        the live peers. They end with their generation."""
        peers = groups.stage_control
        with (self.holding(peers.group, _OF_PEERS),
              replaced(parallel_state, _MPU_DATA_PARALLEL_WORLD_SIZE=peers.size, _MPU_DATA_PARALLEL_RANK=peers.rank)):
            yield

    def detach(self, backend: str) -> None:
        """Call it once, before training: it keeps Megatron's sizes and ranks nominal, and makes a group of this
        worker's own for `alone`, which communicates by ``backend``."""
        state: Any = parallel_state
        self._alone = new_group(f"{OWN}alone/{uuid.uuid4().hex}", [dist.get_rank()], dist.HashStore(),
                                backend=backend, timeout=60.0, connect_timeout=60.0)
        state._MPU_DATA_PARALLEL_WORLD_SIZE = parallel_state.get_data_parallel_world_size()
        state._MPU_DATA_PARALLEL_RANK = parallel_state.get_data_parallel_rank()

    def alone(self) -> AbstractContextManager[None]:
        """Inside the block this worker is the only member of Megatron's groups for data and model parallelism: its own
        collectives of an iteration end here."""
        return self.holding(self._alone, _SHARED)

    @property
    def is_alone(self) -> bool:
        """Whether the caller is in such a block."""
        return all(getattr(parallel_state, name) is self._alone for name in _SHARED)


class TensorGroup:
    """The group that a worker's tensor-parallel parts compute in, wherever ``model`` and Megatron keep it.

    An aborted group is useless, so each generation has another.
    """

    def __init__(self, model: nn.Module) -> None:
        self._now = parallel_state.get_tensor_model_parallel_group()
        self._model = model
        self._adopted: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def adopt(self, module: nn.Module) -> None:
        """Switch the group of a ``module`` built later too, for as long as it exists."""
        self._adopted.add(module)

    def use(self, group: dist.ProcessGroup) -> None:
        state: Any = parallel_state
        holders = [holder for module in (self._model, *self._adopted) for holder in _holders(module, self._now)]
        for holder, name in ((state, "_TENSOR_MODEL_PARALLEL_GROUP"), *holders):
            setattr(holder, name, group)
        self._now = group


def _holders(model: nn.Module, group: Any) -> list[tuple[Any, str]]:
    """The objects in ``model`` that keep ``group``, with the attribute's name; a first forward may add some."""
    found: list[tuple[Any, str]] = []
    for module in model.modules():
        holders = [module, *_collections(module), *quantizers_of(module)]
        found += [(holder, name) for holder in holders for name, value in vars(holder).items() if value is group]
    return found


def _collections(module: nn.Module) -> list[ProcessGroupCollection]:
    """The collections of groups that ``module`` itself keeps."""
    return [value for value in vars(module).values() if isinstance(value, ProcessGroupCollection)]


def adapt_timers(kept: Kept, is_logging_rank: Callable[[], bool]) -> None:
    """Megatron's timers wait for other ranks only between iterations, outside of `Kept.alone`. They log on the logging
    rank, instead of a fixed rank that may be dead."""
    timer: Any = timers.Timer
    start, stop = timer.start, timer.stop
    group: Any = timers.Timers
    log = group.log

    def start_here(self: Any, barrier: bool = False) -> None:
        start(self, barrier and not kept.is_alone)

    def stop_here(self: Any, barrier: bool = False) -> None:
        stop(self, barrier and not kept.is_alone)

    def log_here(self: Any, names: Any, rank: int | None = None, **options: Any) -> None:
        log(self, names, (dist.get_rank() if is_logging_rank() else -1) if rank is None else rank, **options)

    timer.start, timer.stop, group.log = start_here, stop_here, log_here
