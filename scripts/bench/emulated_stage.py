"""The job that `emulated.py` times: a DeepSpeed pipeline whose stages sleep instead of computing.

Works with the stock engine and with ours alike. Each worker writes how long its iterations took and which
micro-batches it ran to `--out`/worker-RANK.json.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.dataloader import RepeatingLoader
from emulated_parts import Emulated, Numbers, arguments, write  # beside this script
from torch.utils.data import DistributedSampler


def mean(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 1e-6 * outputs.mean()


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
                stage.find_splitter = lambda: engine._splitter
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
    write(args.out, dist.get_rank(), (engine.grid.get_data_parallel_id(), engine.stage_id), ends, stage)


if __name__ == "__main__":
    main()
