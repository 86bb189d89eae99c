"""The job that `emulated.py` times: a DeepSpeed pipeline whose stages sleep instead of computing.

Forward, input gradient and weight gradient of a stage sleep for given times; the tensors between stages are
real. Works with the stock engine and with ours alike. Each worker writes how long its iterations took and which
micro-batches it ran to `--out`/worker-RANK.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.dataloader import RepeatingLoader
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

WIDTH = 64


class Numbers(Dataset):
    """Samples that carry their own number through the pipeline."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = torch.zeros(WIDTH)
        sample[0] = index
        return sample, torch.zeros(1)


class WeightLater:
    """A weight gradient that is not computed yet, as the runtime's queue takes it."""

    def __init__(self, stage: Emulated, number: int) -> None:
        self.weight, self.bias, self.fused = stage.weight, None, None
        self._stage, self._number = stage, number

    def contributions(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        yield self.weight, self._stage.weight_gradient(self._number)


class Emulated(nn.Module):
    """One stage. ``splitter`` is set where the engine can defer weight gradients."""

    def __init__(self, seconds: tuple[float, float, float], parameters: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(parameters))
        self.splitter: Any = None
        self.ran: list[tuple[str, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, self)

    def weight_gradient(self, number: int) -> torch.Tensor:
        time.sleep(self.seconds[2])
        self.ran.append(("W", number))
        return torch.full_like(self.weight, 1e-3 * (1 + number % 7))


class _Sleep(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, stage: Emulated) -> torch.Tensor:
        time.sleep(stage.seconds[0])
        ctx.stage, ctx.number = stage, int(x[0, 0])
        stage.ran.append(("F", ctx.number))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient, = gradients
        stage = ctx.stage
        time.sleep(stage.seconds[1])
        stage.ran.append(("B", ctx.number))
        queue = stage.splitter.queue if stage.splitter is not None else None
        if queue is None:
            return gradient.clone(), stage.weight_gradient(ctx.number), None
        queue.deferred.append(WeightLater(stage, ctx.number))
        return gradient.clone(), None, None


def mean(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 1e-6 * outputs.mean()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipelines", type=int, required=True)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--seconds", type=float, nargs=3, required=True, metavar=("F", "B", "W"))
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--clipping", type=float, default=0.0)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def build(args: argparse.Namespace) -> Any:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute of compiling for nothing
    deepspeed.init_distributed("gloo", verbose=False)
    layers = [LayerSpec(Emulated, tuple(args.seconds), args.parameters) for _ in range(args.stages)]
    model = PipelineModule(layers, num_stages=args.stages, loss_fn=mean, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": args.microbatches,
              "steps_per_print": 10**6, "gradient_clipping": args.clipping,
              "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
    data = Numbers(args.pipelines * args.microbatches * args.iterations)
    ours = "megatron_recycle" in getattr(deepspeed.initialize, "__module__", "") or hasattr(
        deepspeed.initialize, "recycle_stock_initialize")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config,
                                      training_data=data if ours else None)
    if hasattr(engine, "settle"):
        for stage in engine.module.modules():
            if isinstance(stage, Emulated):
                stage.splitter = engine._splitter
    else:
        # As stock's own pipeline loader, without its two loader processes per rank.
        sampler = DistributedSampler(data, args.pipelines, engine.grid.get_data_parallel_id(), shuffle=False)
        engine.set_dataloader(RepeatingLoader(engine.deepspeed_io(data, data_sampler=sampler, num_local_io_workers=0)))
    return engine


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    engine = build(args)
    stage = next(part for part in engine.module.modules() if isinstance(part, Emulated))
    ends = []
    for _ in range(args.iterations):
        engine.train_batch()
        ends.append(time.time())
    if hasattr(engine, "settle"):
        engine.settle()
    result = {"pipeline": engine.grid.get_data_parallel_id(), "stage": engine.stage_id, "ends": ends,
              "ran": stage.ran, "weight": [stage.weight[0].item(), stage.weight.sum().item()]}
    (args.out / f"worker-{dist.get_rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
