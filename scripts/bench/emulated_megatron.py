"""The job that `emulated.py --backend megatron` times: core's schedule, DDP and optimizer around stages that sleep.

Works with core's own 1F1B and with the plugin's schedule alike; writes what `emulated_stage.py` writes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated_parts import PROCESS, WIDTH, Emulated, Numbers, arguments, write  # beside this script
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pretrain_gpt_megatron import PipelineSampler

import megatron_cpu

Sample = tuple[torch.Tensor, torch.Tensor]


def model_of(args: argparse.Namespace) -> tuple[Any, Any, Emulated]:
    """This stage in Megatron's wrapper for data parallelism, its optimizer, and the layer that sleeps."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Stage(MegatronModule):
        """A stage as core's schedule needs it; activations are (1, 1, WIDTH)."""

        model_type = ModelType.encoder_or_decoder
        share_embeddings_and_output_weights = False

        def __init__(self) -> None:
            super().__init__(config)
            self.pre_process = parallel_state.is_pipeline_first_stage()
            self.layer = Emulated(tuple(args.seconds), args.parameters)
            self.given: torch.Tensor | None = None

        def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
            self.given, = tensors

        def forward(self, sample: torch.Tensor | None) -> torch.Tensor:
            inputs = sample if self.pre_process else self.given
            assert inputs is not None
            return self.layer(inputs.view(1, 1, WIDTH))

    config = TransformerConfig(
        num_layers=args.stages, hidden_size=WIDTH, num_attention_heads=1, use_cpu_initialization=True,
        pipeline_model_parallel_size=args.stages, pipeline_dtype=torch.float32, gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=False)
    stage = Stage()
    model: Any = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=False), stage)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", lr=1e-3, weight_decay=0.0, clip_grad=args.clipping), [model])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = model.no_sync
    return model, optimizer, stage.layer


def forward_step(data: Iterator[Sample] | None, model: nn.Module) -> tuple[torch.Tensor, Any]:
    sample = next(data)[0] if data is not None else None
    return model(sample), lambda outputs: (1e-6 * outputs.mean(), {"loss": outputs.detach().mean()})


def main() -> None:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    args = arguments()
    torch.set_num_threads(1)
    megatron_cpu.install()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, args.stages)
    model_parallel_cuda_manual_seed(1)
    model, optimizer, stage = model_of(args)
    pipeline = parallel_state.get_data_parallel_rank()
    numbers = Numbers(args.pipelines * args.microbatches * args.iterations)
    data: Iterator[Sample] | None = None
    if parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage():
        data = iter(DataLoader(numbers, batch_sampler=PipelineSampler(len(numbers), 1, pipeline, args.pipelines)))
    schedule: Any = get_forward_backward_func()
    PROCESS.find_splitter = lambda: getattr(schedule, "splitter", None)
    step = partial(schedule, forward_step_func=forward_step, data_iterator=data, model=[model],
                   num_microbatches=args.microbatches, seq_length=1, micro_batch_size=1, forward_only=False)
    ends = []
    for _ in range(args.iterations):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        step()
        optimizer.step()
        ends.append(time.time())
    number = parallel_state.get_pipeline_model_parallel_rank()
    write(args.out, dist.get_rank(), (pipeline, number), ends, {number: stage})


if __name__ == "__main__":
    main()
