"""A DeepSpeed script with tensor parallelism, as Megatron-DeepSpeed and gpt-neox write it: layers that are cut over the
ranks of a group of the script's own, a loader on the first of them, and a batch function that broadcasts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

import megatron_recycle
from megatron_recycle.config import RecycleConfig
from tests.backends.gpt_job import BATCH, WIDTH, Embedding, Head, Text, loss_fn
from tests.backends.lent import lend

GROUP: list[Any] = []
"""The script's group of tensor-parallel ranks, where its functions find it."""


class Copy(torch.autograd.Function):
    """Forward as it is, backward summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=GROUP[0])
        return gradient


class Reduce(torch.autograd.Function):
    """Forward summed over the group, backward as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=GROUP[0])
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Block(nn.Module):
    """Half of its inner layer is here, the rest on the other rank."""

    def __init__(self, parts: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH // parts)
        self.down = nn.Linear(2 * WIDTH // parts, WIDTH, bias=False)
        with torch.no_grad():
            for linear in (self.up, self.down):
                linear.weight.copy_(torch.randn(linear.weight.shape, generator=torch.Generator().manual_seed(
                    dist.get_rank(GROUP[0]))) * 0.2)
        for parameter in (*self.up.parameters(), *self.down.parameters()):
            parameter.model_parallel = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(self.up(Copy.apply(self.norm(x))))
        if self.dropout:
            with get_cuda_rng_tracker().fork():
                y = functional.dropout(y, self.dropout, self.training)
        return x + Reduce.apply(self.down(y))


def broadcast(batch: Any) -> Any:
    """The batch of the first rank of the group, on all of them."""
    given = batch if batch is not None else [torch.empty(BATCH, 8, dtype=torch.long) for _ in range(2)]
    for tensor in given:
        dist.broadcast(tensor, dist.get_process_group_ranks(GROUP[0])[0], group=GROUP[0])
    return tuple(given)


def train(observer_of: Callable[[str], Any], rank: int, *, stages: int, pipelines: int, parts: int,
          iterations: int = 4, microbatches: int = 3, dropout: float = 0.0, plugin: bool = True,
          clipping: float = 0.5, settings: dict[str, Any] | None = None, evaluate: bool = False,
          save: str | None = None, zero: int = 0, ramp: Sequence[int] = (), lends: bool = False) -> Any:
    """As `gpt_job.train`, on a topology of three axes. ``evaluate``: after each iteration. ``zero``: its stage.
    ``ramp``: micro-batches of the first iterations. ``lends``: whether layers are lent, as "borrowed" says."""
    if lends:
        lend()
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=parts, num_dp=pipelines)
    place = topology.get_coord(rank)
    if plugin:
        config = RecycleConfig(**{"heartbeat_interval": 0.2, "heartbeat_timeout": 15.0, "planner_budget": 0.0,
                                  "stall_floor": 60.0, "verify": "peers", **(settings or {})})
        megatron_recycle.enable(config, observer=observer_of(f"{place.data}:{place.pipe}.{place.model}"))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    for ranks in topology.get_axis_comm_lists("model"):
        group = dist.new_group(ranks)
        if rank in ranks:
            GROUP[:] = [group]
    if dropout:
        get_cuda_rng_tracker().add("model-parallel-rng", 100 + rank)
    torch.manual_seed(7)
    model = PipelineModule([LayerSpec(Embedding), *[LayerSpec(Block, parts, dropout) for _ in range(2 * stages)],
                            LayerSpec(Head)], topology=topology, partition_method="uniform", loss_fn=loss_fn)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_batch_size": BATCH * microbatches * pipelines, "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": microbatches, "steps_per_print": 1000, "gradient_clipping": clipping,
        "zero_optimization": {"stage": zero}, "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}})
    engine.set_batch_fn(broadcast)
    iterator = validation = None
    if place.model == 0 and place.pipe in (0, stages - 1):
        sampler = DistributedSampler(Text(), pipelines, place.data, shuffle=False)
        iterator = itertools.cycle(DataLoader(Text(), BATCH, sampler=sampler))
        validation = itertools.cycle(DataLoader(Text(5000), BATCH, sampler=sampler))
    losses, evaluated = [], []
    for iteration in range(iterations):
        if iteration < len(ramp):
            engine.set_train_batch_size(BATCH * pipelines * ramp[iteration])
        losses.append(engine.train_batch(iterator).item())
        dist.barrier()
        if evaluate:
            evaluated.append(engine.eval_batch(validation).item())
    if save:
        engine.save_checkpoint(save)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if plugin:
        engine.settle()
    result = {"losses": losses, "evaluated": evaluated,
              "parameters": {name: value.detach().numpy().copy() for name, value in engine.module.named_parameters()},
              "state": [{key: torch.as_tensor(value).numpy().copy() for key, value in state.items()}
                        for _, state in sorted(inner.state_dict()["state"].items())]}
    if plugin:
        result["borrowed"] = len(engine.session.worker.site.trainable.neighbours.parameters)
        engine.session.finish()
    return result
