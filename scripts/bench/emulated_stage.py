"""The job that `emulated.py` times: a DeepSpeed pipeline whose stages sleep instead of computing.

Works with the stock engine and with ours alike. Each worker writes how long its iterations took and which
micro-batches it ran to `--out`/worker-RANK.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.dataloader import RepeatingLoader
from emulated_parts import PROCESS, Emulated, Numbers, arguments, write  # beside this script
from torch.utils.data import DistributedSampler

from megatron_recycle.backends.deepspeed.chunks import chunks_of


def mean(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 1e-6 * outputs.mean()


class Partitioned(PipelineModule):
    """Stages of so many layers; where each has two chunks, half of them in each, first down the stages, then up."""

    def __init__(self, layers: Sequence[LayerSpec], sizes: Sequence[int], **options: Any) -> None:
        self.sizes = sizes
        super().__init__(layers, num_stages=len(sizes), **options)

    def _partition_layers(self, method: str = "uniform") -> None:
        halves = [size // 2 for size in self.sizes]
        cut = self.sizes if self.num_stages == len(self.sizes) else [*halves, *(
            size - half for size, half in zip(reversed(self.sizes), reversed(halves)))]
        self.parts = [0, *accumulate(cut)]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def build(args: argparse.Namespace) -> Any:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute of compiling for nothing
    deepspeed.init_distributed("gloo", verbose=False)
    sizes = args.layers if len(args.layers) == args.stages else args.layers * args.stages
    seconds = tuple(each * args.stages / sum(sizes) for each in args.seconds)
    layers = [LayerSpec(Emulated, seconds, args.parameters) for _ in range(sum(sizes))]
    model = Partitioned(layers, sizes, loss_fn=mean)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": args.microbatches,
              "steps_per_print": 10**6, "gradient_clipping": args.clipping,
              "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
    data = Numbers(args.pipelines * args.microbatches * args.iterations, args.width)
    ours = "megatron_recycle" in getattr(deepspeed.initialize, "__module__", "") or hasattr(
        deepspeed.initialize, "recycle_stock")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config,
                                      training_data=data if ours else None)
    if hasattr(engine, "settle"):
        PROCESS.find_splitter = lambda: engine._splitter
    else:
        # As stock's own pipeline loader, without its two loader processes per rank.
        sampler = DistributedSampler(data, args.pipelines, engine.grid.get_data_parallel_id(), shuffle=False)
        engine.set_dataloader(RepeatingLoader(engine.deepspeed_io(data, data_sampler=sampler, num_local_io_workers=0)))
    return engine


def numbered(engine: Any) -> dict[int, Emulated]:
    """The layers of this worker, of all its chunks, by their numbers in the model."""
    module = engine.module
    chunks = chunks_of(module)
    numbers = chunks.layers(engine.stage_id) if chunks else range(*module.parts[engine.stage_id:engine.stage_id + 2])
    return {number: layer for number, layer in zip(numbers, module.forward_funcs, strict=True)
            if isinstance(layer, Emulated)}


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    engine = build(args)
    stage = numbered(engine)
    ends = []
    for _ in range(args.iterations):
        engine.train_batch()
        ends.append(time.time())
    if hasattr(engine, "settle"):
        engine.settle()
    write(args.out, dist.get_rank(), (engine.grid.get_data_parallel_id(), engine.stage_id), ends, stage)


if __name__ == "__main__":
    main()
