"""Megatron's distributed optimizer, as the runtime drives it.

Stock ties a shard to a data-parallel rank, so that a dead worker's shard is lost. Here the runtime's table places each
shard on several workers. Shards begin as stock cuts them (each bucket of the gradient buffer in as many equal pieces as
an optimizer instance has ranks), and each parameter's part is stepped apart, as in stock. Stock's optimizer keeps its
groups, its loader and its forms of checkpoints, but no tensors. A view of one shard makes it act as on that shard's
rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

from megatron_recycle.backends.megatron.master_weights import masters_of
from megatron_recycle.backends.megatron.optimizer_groups import groups_of
from megatron_recycle.errors import UnsupportedError
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.comm.sharded_reduction import Cuts
from megatron_recycle.runtime.compute.sharded_optimizer import MASTER, Piece, ShardedOptimizer, Slot

_STATES = ("exp_avg", "exp_avg_sq")
_TOGETHER = ("fully_reshardable", "dp_zero_gather_scatter")
"""Forms of checkpoints that are gathered from all shards."""
_OF_ALL = ("per_bucket_numel", "per_bucket_numel_unpadded")
"""Names in a shard's part of a checkpoint that are equal in all shards."""
_LOADERS = {"dp_reshardable": "load_parameter_state_from_dp_reshardable",
            "fully_reshardable": "load_parameter_state_from_fully_reshardable",
            "fully_sharded_model_space": "load_parameter_state_from_fs_model_space"}
"""Stock's functions that load each form into one rank's shard."""


class Distributed:
    """Takes over ``stock`` with its loaded or initial state.

    Attributes:
        parameters: of the model, in the order of stock's norm.
        shards: the state; this worker begins with the shard of its rank in stock.
        where: gives the shards' holders, and the groups of the live workers; from the start of training on.
    """

    def __init__(self, stock: DistributedOptimizer) -> None:
        self.where: Callable[[], tuple[Cuts, Groups]]
        self._stock: Any = stock
        self._inner: Any = stock.optimizer
        self._masters = masters_of(self._inner)
        own, count, instances = _rank(stock)
        self._ranges = [_ranges(stock, _Rank(shard, count)) for shard in range(count)]
        """By shard, as stock's `gbuf_ranges`."""
        group_of = _groups(stock)
        kinds = {parameter.dtype for parameter in group_of}
        if len(kinds) > 1:
            raise UnsupportedError("with the distributed optimizer all parameters of a stage must have one type, and "
                                   f"these have {', '.join(sorted(map(str, kinds)))}: leave use_distributed_optimizer "
                                   "off")
        cut = [[Slot(group_of[parameter], of["param"].size, (Piece(parameter, of["param"].start, of["param"].end, 0),))
                for parameter, of in _in_order(ranges)] for ranges in self._ranges]
        tensors, numbers = self._let_go(own)
        # The order of stock's norm: by group, then as in the buffers.
        order = {parameter: number for number, parameter in enumerate(
            parameter for buffer in stock.buffers for parameter in buffer.param_index_map)}
        self.parameters = sorted(group_of, key=lambda parameter: (group_of[parameter], order[parameter]))
        self.shards = ShardedOptimizer(self._inner, cut, (), least=instances, in_place=True,
                                       rounded=self._masters.rounded, state_bytes=self._masters.state_bytes)
        self.shards.take(own, tensors, numbers)
        self._plain = dict(vars(stock))
        stock.state_dict = lambda: self.view(self._any()).state_dict()
        stock.sharded_state_dict = self._sharded_state_dict
        stock.get_parameter_state_dp_zero = self._whole
        stock.save_parameter_state = self._save
        stock.load_state_dict = stock.load_parameter_state = stock.reload_model_params = _too_late
        self._loads = False

    def _let_go(self, own: int) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        """Remove shard ``own`` from stock, and return it as arguments of `ShardedOptimizer.take`."""
        stock, tensors, numbers = self._stock, {}, []
        for number, (parameter, _) in enumerate(_in_order(self._ranges[own])):
            group, place = stock.model_param_group_index_map[parameter]
            held = self._inner.param_groups[group]["params"][place]
            state = self._inner.state.pop(held, {})
            tensors[f"{MASTER} {number}"] = self._masters.taken(held, state)
            # Stock's loader shares one step count between all parameters, each of which would add to it.
            tensors.update({f"{key} {number}": value if value.dim() else value.clone() for key, value in state.items()
                            if isinstance(value, torch.Tensor)})
            numbers.append({key: value for key, value in state.items() if not isinstance(value, torch.Tensor)})
            if hasattr(parameter, "main_param"):
                parameter.main_param = None
        for name in ("model_float16_groups", "model_fp32_groups", "shard_float16_groups", "shard_fp32_groups",
                     "shard_fp32_from_float16_groups"):
            setattr(stock, name, [[] for _ in getattr(stock, name)])
        for begun in stock.opt_group_ranges:  # the torch optimizer's original groups, which hold the masters once more
            begun["orig_group"]["params"] = []
        return tensors, numbers

    # ---- checkpoints

    def view(self, shard: int) -> Any:
        """Stock's optimizer on the rank of ``shard``, which this worker holds."""
        view: Any = object.__new__(DistributedOptimizer)
        inner: Any = object.__new__(type(self._inner))
        vars(inner).update(vars(self._inner))
        ranges, slots = self._ranges[shard], self.shards.slots(shard)
        shown = [self._masters.shown(_part(slot), master, self._inner.state.get(master))
                 for slot, master in zip(slots, self.shards.masters(shard), strict=True)]
        self._masters.show(inner)
        inner.param_groups = [{**group, "params": [held for slot, (held, _) in zip(slots, shown)
                                                   if slot.group == number]}
                              for number, group in enumerate(self._inner.param_groups)]
        inner.state = {held: state for held, state in shown if state is not None}
        places: dict[nn.Parameter, tuple[int, int]] = {}
        for (parameter, _), slot in zip(_in_order(ranges), slots, strict=True):
            places[parameter] = slot.group, sum(group == slot.group for group, _ in places.values())
        vars(view).update({
            **self._plain, "optimizer": inner, "gbuf_ranges": ranges,
            "model_param_gbuf_map": DistributedOptimizer._build_model_param_gbuf_map(ranges),
            "model_param_group_index_map": places, "data_parallel_group": _Rank(shard, self.shards.count),
            "data_parallel_group_gloo": None, "distributed_optimizer_instance_id": 0})
        return view

    def _spoken_for(self) -> list[int]:
        """The shards that this worker writes."""
        cuts, groups = self.where()
        return cuts.spoken_for(groups.me)

    def _any(self) -> int:
        """A shard that this worker holds: the first one that it writes, if any."""
        return min(self._spoken_for(), default=self.shards.held[0])

    def _sharded_state_dict(self, model_sharded_state_dict: Any, is_loading: bool = False,
                            sharding_type: str | None = None, metadata: Mapping[str, Any] | None = None) -> Any:
        """Stock's state dict of all shards that this worker writes, dead ranks' included, or that it has to load."""
        if is_loading and not self._loads:
            _too_late()
        first, metadata = self._any(), {"distrib_optim_sharding_type": "fully_sharded_model_space", **(metadata or {})}
        if sharding_type is not None:
            metadata["distrib_optim_sharding_type"] = sharding_type
        kind = metadata["distrib_optim_sharding_type"]
        if kind in _TOGETHER:
            view = self._to_load(first) if is_loading else self.view(first)
            view.get_parameter_state_dp_zero = self._whole
            group = self.where()[1].stage_control.group
            view.data_parallel_group = _Rank(dist.get_rank(group), dist.get_world_size(group))
            return view.sharded_state_dict(model_sharded_state_dict, is_loading=is_loading, metadata=metadata)
        found = {shard: (self._to_load(shard) if is_loading else self.view(shard)).sharded_state_dict(
            model_sharded_state_dict, is_loading=is_loading, metadata=metadata)
            for shard in (self.shards.held if is_loading else self._spoken_for())}
        for shard in found.keys() - {first} if is_loading else ():  # values shared by all shards are loaded once
            for name in _OF_ALL:
                found[shard]["param_state"].pop(name, None)
        if not found:
            common = kind in DistributedOptimizer.checkpoint_fully_reshardable_formats
            return {**(self.view(first).state_dict() if common else {}), "param_state_sharding_type": kind}
        return {**found[first], "param_state": {shard: one["param_state"] for shard, one in found.items()}}

    def _whole(self, use_gloo_comm: bool = True, empty_data: bool = False,
               return_on_all_ranks: bool = False) -> dict[Any, Any] | None:
        """Stock's `get_parameter_state_dp_zero`: masters and moments of all shards, laid out as the gradient buffers
        without padding between buckets. On the first live worker, or on all of them."""
        cuts, groups = self.where()
        peers, me = groups.peers(groups.me.stage), groups.me
        found: dict[Any, Any] = {"buckets_coalesced": True}
        views = {} if empty_data else {shard: self.view(shard) for shard in cuts.spoken_for(me)}
        for number, buffer in enumerate(self._stock.buffers):
            world = {key: torch.zeros(buffer.numel_unpadded, dtype=torch.float32, device="cpu")
                     for key in ("param", *_STATES)}
            begin = 0
            for index, bucket in enumerate(buffer.buckets):
                for key, flat in ({} if empty_data else world).items():
                    parts = [self._part(views.get(shard), shard, number, index, key, bucket.grad_data.numel())
                             for shard in range(self.shards.count)]
                    for shard, part in enumerate(parts):
                        dist.broadcast(part, group=groups.stage_control.group,
                                       group_src=peers.index(cuts.holders[shard][0]))
                    flat[begin:begin + bucket.numel_unpadded] = torch.cat(parts)[:bucket.numel_unpadded]
                begin += bucket.numel_unpadded
            kind = buffer.param_dtype, buffer.grad_dtype
            found[number] = {kind: {**world, "numel_unpadded": buffer.numel_unpadded}}
        return found if return_on_all_ranks or peers[0] == me else None

    def _part(self, view: Any, shard: int, buffer: int, bucket: int, key: str, length: int) -> torch.Tensor:
        """``key`` of a shard's whole piece of a bucket; zeros where ``view`` is None. In fp32, so that masters lose no
        bits."""
        part = torch.zeros(length // self.shards.count, dtype=torch.float32, device="cpu")
        if view is not None:
            (buckets,) = self._ranges[shard][buffer].values()
            for parameter, of in buckets[bucket]["param_map"].items():
                values = self._master(shard, parameter) if key == "param" else (
                    view._get_main_param_and_optimizer_states(parameter)[key])
                part[of["gbuf_local"].start:of["gbuf_local"].end] = values.detach().cpu()
        return part

    def _master(self, shard: int, parameter: nn.Parameter) -> torch.Tensor:
        """The master of the part of ``parameter`` in a shard that this worker holds."""
        return next(master for slot, master in zip(self.shards.slots(shard), self.shards.masters(shard))
                    if slot.pieces[0].parameter is parameter)

    def _save(self, filename: str) -> None:
        """Stock's file of all shards, written by the first live worker."""
        state = self._whole()
        if state is not None:
            torch.save(state, filename)


    # ---- the way back to a checkpoint of this job

    @contextmanager
    def going_back(self) -> Iterator[None]:
        """A block in which stock's loader may load a checkpoint, of any of its forms, into this worker's shards: only
        during a way back do all peers load the same one."""
        stock = self._stock
        stock.load_state_dict, stock.load_parameter_state, self._loads = self._load, self._load_file, True
        try:
            yield
        finally:
            stock.load_state_dict, stock.load_parameter_state, self._loads = _too_late, _too_late, False

    def _to_load(self, shard: int) -> Any:
        """The view of a shard of this worker, for stock's loaders; its holders differ in replica number."""
        for master in self.shards.masters(shard):
            state = self._inner.state[master]
            for key in (key for key in _STATES if key not in state):
                state[key] = self._masters.zeros(key, master)
            if _counts_in_state(self._inner) and "step" not in state:
                state["step"] = torch.tensor(0.0)
        cuts, groups = self.where()
        view = self.view(shard)
        view.distributed_optimizer_instance_id = cuts.holders[shard].index(groups.me)
        view.load_state_dict = lambda state_dict: None  # all that it would create is there
        view._set_main_param_and_optimizer_states = lambda parameter, tensors: self._set(shard, parameter, tensors)
        return view

    @torch.no_grad()
    def _set(self, shard: int, parameter: nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
        """Stock's `_set_main_param_and_optimizer_states`, without the step count, which is set elsewhere."""
        slot = next(slot for slot in self.shards.slots(shard) if slot.pieces[0].parameter is parameter)
        self._masters.set(self._master(shard, parameter), _part(slot),
                          {key: tensors[key] for key in ("param", *_STATES)})

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        """Stock's `load_state_dict`: step counts and, if present, masters and moments. Settings of groups are the
        loop's."""
        steps = {group["step"] for group in state_dict["optimizer"]["param_groups"] if "step" in group}
        views = {shard: self._to_load(shard) for shard in self.shards.held}
        for step in steps:  # only one
            for group in () if _counts_in_state(self._inner) else self._inner.param_groups:  # also without a step
                group["step"] = step
            for state in (state for state in self._inner.state.values() if "step" in state):
                state["step"] = torch.tensor(float(step))
        if self._stock.grad_scaler is not None and "grad_scaler" in state_dict:
            self._stock.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        if "param_state" not in state_dict:
            return
        kind, found = state_dict["param_state_sharding_type"], state_dict["param_state"]
        if kind not in _LOADERS:
            raise UnsupportedError(f"no way back to a checkpoint whose optimizer has the form {kind}")
        for shard, view in views.items():
            getattr(view, _LOADERS[kind])(found if kind in _TOGETHER else found[shard])

    def _load_file(self, filename: str, **_: Any) -> None:
        """Stock's `load_parameter_state`, for files of `_save`."""
        state = torch.load(filename, map_location="cpu", weights_only=False)
        for shard in self.shards.held:
            self._to_load(shard)
            for number, buffer in enumerate(self._stock.buffers):
                (world,), (buckets,), begin = state[number].values(), self._ranges[shard][number].values(), 0
                for bucket, ranges in zip(buffer.buckets, buckets, strict=True):
                    piece = begin + shard * (bucket.grad_data.numel() // self.shards.count)
                    for parameter, of in ranges["param_map"].items():
                        at = slice(piece + of["gbuf_local"].start, piece + of["gbuf_local"].end)
                        self._set(shard, parameter, {key: world[key][at] for key in ("param", *_STATES)})
                    begin += bucket.numel_unpadded


def _part(slot: Slot) -> torch.Tensor:
    """The model's values of a slot, which is a part of one parameter."""
    (piece,) = slot.pieces
    return piece.parameter.data.view(-1)[piece.start:piece.end]


def _counts_in_state(inner: Any) -> bool:
    """Whether an Adam counts steps for each parameter: torch's does, others' for each group."""
    return isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))


class _Rank:
    """Acts as a process group that only knows its rank and size."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def _rank(stock: Any) -> tuple[int, int, int]:
    """This worker's shard, the number of shards, and stock's number of optimizer instances."""
    group, config = stock.data_parallel_group, stock.ddp_config
    return group.rank(), group.size(), int(config.num_distributed_optimizer_instances)


def _ranges(stock: Any, rank: _Rank) -> list[dict[Any, Any]]:
    """Stock's `gbuf_ranges` on another rank."""
    ranges = []
    for buffer in stock.buffers:
        view = copy.copy(buffer)  # the attributes read depend on the version
        view.data_parallel_group = rank
        ranges.append(DistributedOptimizer._build_gbuf_range_map(view))
    return ranges


def _in_order(ranges: Sequence[Mapping[Any, Any]]) -> list[tuple[nn.Parameter, Mapping[str, Any]]]:
    """The parameters of a shard, with their ranges, in stock's order."""
    return [(parameter, of) for by_kind in ranges for buckets in by_kind.values() for bucket in buckets
            for parameter, of in bucket["param_map"].items()]


def _groups(stock: Any) -> dict[nn.Parameter, int]:
    """The optimizer's group of each parameter of the model, other ranks' included."""
    groups = groups_of(stock)
    if groups is None:
        raise UnsupportedError("the distributed optimizer was made before megatron_recycle.enable(): call that first")
    return {parameter: number for number, group in enumerate(groups) for parameter in group}


def _too_late(*arguments: Any, **keywords: Any) -> Any:
    raise UnsupportedError("with the distributed optimizer a checkpoint is loaded before the first iteration: "
                           "parameters and optimizer state that are loaded later would be this worker's alone")


def check(singles: Sequence[Any]) -> list[str]:
    """Refusals of settings that go with the distributed optimizer."""
    return ["reduce_scatter_with_fp32_accumulation: set grad_reduce_in_fp32 (--accumulate-allreduce-grads-in-fp32) "
            "instead" for single in singles if isinstance(single, DistributedOptimizer)
            and single.ddp_config.reduce_scatter_with_fp32_accumulation]
