"""The job that `emulated.py --backend megatron` times: a GPTModel whose transformer layers sleep instead of computing.

Works with core's own 1F1B and with the plugin's schedule alike, also where layers are lent, and with two chunks on each
stage (`chunks: 2`); writes what `emulated_stage.py` writes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated_parts import PROCESS, Emulated, Numbers, arguments, write  # beside this script
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pretrain_gpt_megatron import PipelineSampler

import megatron_cpu

Sample = tuple[torch.Tensor, torch.Tensor]


def layers_that_sleep(seconds: tuple[float, float, float], parameters: int) -> Any:
    """The specification of a transformer layer of which nothing is left but what sleeps in its attention's place."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    class Attention(Emulated):

        attn_mask_type = AttnMaskType.causal

        def __init__(self, **_: Any) -> None:
            super().__init__(seconds, parameters)

        def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> Any:
            return super().forward(x), None

    def without_residual(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        return lambda output, residual, dropout: output[0]

    return ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(
        self_attention=ModuleSpec(Attention), self_attn_bda=without_residual))


def build(args: argparse.Namespace) -> tuple[list[Any], Any]:
    """This stage's models in Megatron's wrapper for data parallelism, one for each chunk, and their optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    count, = args.layers
    interleaved = args.chunks if args.chunks > 1 else None
    config = TransformerConfig(
        num_layers=count * args.stages, hidden_size=args.width, num_attention_heads=1, use_cpu_initialization=True,
        pipeline_model_parallel_size=args.stages, virtual_pipeline_model_parallel_size=interleaved,
        pipeline_dtype=torch.float32, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        persist_layer_norm=False, deallocate_pipeline_outputs=False, hidden_dropout=0.0,
        overlap_p2p_comm=interleaved is not None, batch_p2p_comm=interleaved is None)
    seconds = tuple(each / count for each in args.seconds)
    layer = layers_that_sleep((seconds[0], seconds[1], seconds[2]), args.parameters)
    numbers = args.pipelines * args.microbatches * args.iterations
    models = []
    for chunk in range(args.chunks):
        place: dict[str, Any] = {"ignore_virtual": False, "vp_stage": chunk if interleaved else None}
        model: Any = GPTModel(
            config=config, transformer_layer_spec=layer, vocab_size=numbers, max_sequence_length=1,
            position_embedding_type="none", pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=False, vp_stage=place["vp_stage"])
        if model.pre_process:  # hidden states begin with the micro-batch's number
            words = model.embedding.word_embeddings.weight.requires_grad_(False)
            words.zero_()[:, 0] = torch.arange(numbers)
        models.append(DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=False), model))
        models[-1].broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", lr=1e-3, weight_decay=0.0, clip_grad=args.clipping), models)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = [model.no_sync for model in models] if interleaved else models[0].no_sync
    return models, optimizer


def asleep(models: list[Any]) -> Mapping[int, Emulated]:
    """The layers of this worker that sleep, by their numbers in the model."""
    return {layer.layer_number - 1: layer.self_attention for model in models for layer in model.module.decoder.layers}


def forward_step(data: Iterator[Sample] | None, model: Any) -> tuple[torch.Tensor, Any]:
    if not (model.module.pre_process or model.module.post_process):
        return model(None, None, None), None
    assert data is not None
    numbers = next(data)[0][:, :1].long()
    return model(numbers, None, None, labels=numbers), lambda losses: (
        1e-6 * losses.mean(), {"loss": losses.detach().mean()})


def main() -> None:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    args = arguments()
    torch.set_num_threads(1)
    megatron_cpu.install()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, args.stages, args.chunks if args.chunks > 1 else None)
    model_parallel_cuda_manual_seed(1)
    models, optimizer = build(args)
    stage = asleep(models)
    pipeline = parallel_state.get_data_parallel_rank()
    numbers = Numbers(args.pipelines * args.microbatches * args.iterations)
    data = [iter(DataLoader(numbers, batch_sampler=PipelineSampler(len(numbers), 1, pipeline, args.pipelines)))
            for _ in models]
    schedule: Any = get_forward_backward_func()
    PROCESS.find_splitter = lambda: getattr(schedule, "splitter", None)
    step = partial(schedule, forward_step_func=forward_step, data_iterator=data if args.chunks > 1 else data[0],
                   model=models, num_microbatches=args.microbatches, seq_length=1, micro_batch_size=1,
                   forward_only=False)
    ends = []
    for _ in range(args.iterations):
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        step()
        optimizer.step()
        ends.append(time.time())
    number = parallel_state.get_pipeline_model_parallel_rank()
    write(args.out, dist.get_rank(), (pipeline, number), ends, stage)


if __name__ == "__main__":
    main()
