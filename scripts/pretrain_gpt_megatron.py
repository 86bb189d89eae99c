#!/usr/bin/env python3
"""Trains a small byte-level GPT with megatron-core's own parts, as any script built on it would.

    torchrun --nproc-per-node 6 scripts/pretrain_gpt_megatron.py --dump runs/stock   # core's 1F1B, 3 x 2 workers
    recycle run --nproc 6 scripts/pretrain_gpt_megatron.py --dump runs/mine          # the same, surviving failures
    python scripts/pretrain_gpt_megatron.py --validate runs/mine                     # validation loss before and after

Needs the pip package megatron-core only (Megatron-LM's training/ is not in it). The text is that of
gpt_deepspeed.py. Without a GPU, CUDA is made to mean the CPU (megatron_cpu.py) and gloo is used.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from gpt_deepspeed import Windows, compute_the_same_bits, read_text  # beside this script

VOCABULARY = 256


class PipelineSampler:
    """The micro-batches of one pipeline, without end: as Megatron's own sampler, by `data_parallel_rank`."""

    def __init__(self, total: int, size: int, data_parallel_rank: int, data_parallel_size: int) -> None:
        self.total, self.size = total, size
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        start = self.data_parallel_rank * self.size
        while True:
            yield [(start + index) % self.total for index in range(self.size)]
            start += self.size * self.data_parallel_size


def batches(args: argparse.Namespace, validation: bool) -> Iterator[tuple[Tensor, Tensor]] | None:
    """This worker's micro-batches (tokens, labels), each (batch, length); None between first and last stage."""
    from megatron.core import parallel_state

    if not (parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()):
        return None
    dataset = Windows(read_text(args.data), args.length, validation)
    sampler = PipelineSampler(len(dataset), args.batch, parallel_state.get_data_parallel_rank(),
                              parallel_state.get_data_parallel_world_size())
    return iter(DataLoader(dataset, batch_sampler=sampler))


def forward_step(data_iterator: Iterator[tuple[Tensor, Tensor]] | None, model: Any) -> tuple[Tensor, Any]:
    """One micro-batch through a stage, or a chunk of one, and the function that makes a loss of the last output."""
    from megatron.core.utils import get_attr_wrapped_model

    if not (get_attr_wrapped_model(model, "pre_process") or get_attr_wrapped_model(model, "post_process")):
        return model(None, None, None), None
    assert data_iterator is not None
    tokens, labels = (part.cuda() for part in next(data_iterator))
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    later = torch.ones(tokens.shape[1], tokens.shape[1], device=tokens.device).triu(1).bool()[None, None]
    return model(tokens, positions, later, labels=labels), loss_function


def loss_function(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the losses (batch, length), number of tokens, and both for the log; in nats."""
    total = losses.float().sum()
    tokens = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def build(args: argparse.Namespace) -> tuple[Any, list[Any], Any]:
    """Configuration, models of this stage (one for each of its chunks) wrapped for data parallelism, optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import gpt_layer_specs as specifications
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    more: dict[str, Any] = {}
    if args.recompute is not None:
        more["recompute_granularity"] = args.recompute
        if args.recompute == "full":
            more |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if args.fp8 is not None:
        more |= {"fp8": "hybrid", "fp8_recipe": args.fp8}
    config = TransformerConfig(
        num_layers=args.blocks, hidden_size=args.width, num_attention_heads=args.heads,
        use_cpu_initialization=True, tensor_model_parallel_size=args.tensor,
        pipeline_model_parallel_size=args.stages, virtual_pipeline_model_parallel_size=args.interleave,
        sequence_parallel=args.sequence_parallel, qk_layernorm=args.qk_layernorm,
        bf16=args.bf16, fp16=args.fp16, params_dtype=dtype, pipeline_dtype=dtype,
        hidden_dropout=args.dropout, attention_dropout=args.dropout, calculate_per_token_loss=args.per_token_loss,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        persist_layer_norm=False, deallocate_pipeline_outputs=True,
        overlap_p2p_comm=args.interleave is not None, batch_p2p_comm=args.interleave is None,  # as Megatron-LM does
        **more)
    layers = (
        specifications.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
        if args.transformer_engine else
        specifications.get_gpt_layer_local_spec(normalization="LayerNorm", qk_layernorm=args.qk_layernorm))
    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not args.grad_reduce_in_bf16, use_distributed_optimizer=args.distributed_optimizer)
    models = []
    for chunk in range(args.interleave or 1):
        place: dict[str, Any] = {"ignore_virtual": False, "vp_stage": chunk if args.interleave else None}
        model: Any = GPTModel(
            config=config, transformer_layer_spec=layers, vocab_size=VOCABULARY, max_sequence_length=args.length,
            position_embedding_type="learned_absolute",
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=not args.untied, vp_stage=place["vp_stage"])
        model.to(torch.cuda.current_device())
        if args.bf16 or args.fp16:
            model = Float16Module(config, model)
        models.append(DistributedDataParallel(config, data_parallel, model))
        models[-1].broadcast_params()
    precise: dict[str, Any] = {}
    if args.moments is not None:
        moments = torch.bfloat16 if args.moments == "bf16" else torch.float32
        precise = {"use_precision_aware_optimizer": True, "exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer=args.optimizer, lr=args.lr, min_lr=args.min_lr, weight_decay=args.weight_decay,
                        clip_grad=args.clip, log_num_zeros_in_grad=args.count_zeros, bf16=args.bf16,
                        fp16=args.fp16, loss_scale=args.loss_scale, initial_loss_scale=args.initial_loss_scale,
                        loss_scale_window=4, hysteresis=2, params_dtype=dtype, **precise,
                        use_distributed_optimizer=args.distributed_optimizer), models)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = [model.no_sync for model in models] if args.interleave else models[0].no_sync
    return config, models, optimizer


def named(models: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of this stage's models by name; of several with the model's number before it."""
    for number, model in enumerate(models):
        for name, value in model.module.named_parameters():
            yield name if len(models) == 1 else f"{number}.{name}", value


def scheduler_of(args: argparse.Namespace, optimizer: Any) -> Any:
    """Megatron's own: the learning rate decays to `args.min_lr` over all iterations."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=args.lr, min_lr=args.min_lr, lr_warmup_steps=0, lr_decay_steps=args.iterations,
        lr_decay_style="cosine", start_wd=args.weight_decay, end_wd=args.weight_decay, wd_incr_steps=args.iterations,
        wd_incr_style="constant", use_checkpoint_opt_param_scheduler=False)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train `args.iterations` iterations on this worker; returns (and with `args.dump` leaves) its state."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(args.tensor, args.stages, args.interleave)
    torch.manual_seed(args.seed + parallel_state.get_pipeline_model_parallel_rank())
    model_parallel_cuda_manual_seed(args.seed)
    _, models, optimizer = build(args)
    initial = {name: value.detach().clone() for name, value in named(models)}
    data, validation = ([batches(args, unseen) for _ in models] for unseen in (False, True))
    step = partial(
        get_forward_backward_func(), forward_step_func=forward_step, model=models,
        num_microbatches=args.microbatches, seq_length=args.length, micro_batch_size=args.batch)
    scheduler = None if args.min_lr is None else scheduler_of(args, optimizer)
    losses, norms, zeros, validations, times, begin = [], [], [], [], [], time.time()

    def evaluate() -> None:
        for model in models:
            model.eval()
        with torch.no_grad():
            for _ in range(args.eval_iterations):
                validations.append(mean_loss(step(data_iterator=validation, forward_only=True)))
        for model in models:
            model.train()

    for iteration in range(args.iterations):
        if args.eval_every and iteration % args.eval_every == 0:
            evaluate()
        began, processor = time.perf_counter(), time.process_time()
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = step(data_iterator=data, forward_only=False,
                       num_microbatches=[*args.ramp, args.microbatches][min(iteration, len(args.ramp))])
        stepped, norm, none = optimizer.step()
        norm = math.nan if norm is None else norm  # fp16 leaves out steps whose gradients have overflowed
        norms.append(norm)
        zeros.append(none)
        if scheduler is not None and stepped:
            scheduler.step(increment=1)
        losses.append(mean_loss(reports))
        times.append((time.perf_counter() - began, time.process_time() - processor))
        if (iteration + 1) % args.log_every == 0:
            log(step.func, args, iteration + 1, times[-1][0], losses[-1], norm)
    getattr(step.func, "settle", lambda: None)()  # with staggered steps the last one may not be final yet
    state = {
        "pipeline": parallel_state.get_data_parallel_rank(), "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "part": parallel_state.get_tensor_model_parallel_rank(),
        "arguments": {key: value for key, value in vars(args).items() if not isinstance(value, Path)},
        "losses": losses, "norms": [float(norm) for norm in norms],
        "zeros": [float(none or 0) for none in zeros], "times": times, "validations": validations,
        "initial": initial,
        "parameters": {name: value.detach() for name, value in named(models)},
        "optimizer": [{key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
                      for state in optimizer.optimizer.state.values()],
        "seconds": time.time() - begin}
    if args.dump is not None:
        args.dump.mkdir(parents=True, exist_ok=True)
        part = f".{state['part']}" if args.tensor > 1 else ""
        torch.save(state, args.dump / f"worker-{state['pipeline']}-{state['stage']}{part}.pt")
    return state


def mean_loss(reports: list[dict[str, Tensor]]) -> float | None:
    """Loss per token over the global batch, on the last stage; None elsewhere."""
    from megatron.core import parallel_state

    if not reports:
        return None
    total = torch.stack([report["lm loss"] for report in reports]).sum(0)
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return float(total[0] / total[1])


def log(step: Any, args: argparse.Namespace, iteration: int, seconds: float, loss: float | None, norm: Any) -> None:
    """Megatron's log line, on the last rank; with the plugin on the last one that is left, with its part."""
    import torch.distributed as dist

    if not getattr(step, "is_logging_rank", lambda: dist.get_rank() == dist.get_world_size() - 1)():
        return
    extra = getattr(step, "log_part", lambda: "")()
    print(f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{args.iterations:8d} |"
          f" elapsed time per iteration (ms): {1000 * seconds:.1f} | lm loss: {loss:.6E} |"
          f" grad norm: {norm:.3f} |{extra}", flush=True)


def validate(folder: Path, data: Path | None = None, windows: int = 256) -> dict[str, float]:
    """Validation loss, in nats per byte, of the model that the workers left in `folder`.

    One worker per stage is enough: their parameters join to those of a model of one stage, built in this process.

    Returns:
        "first_validation_loss" before and "final_validation_loss" after training.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dumps = [torch.load(path, weights_only=True) for path in sorted(folder.glob("worker-*.pt"))]
    if not dumps:
        raise SystemExit(f"--validate: no worker-*.pt in {folder}; train with --dump {folder} first")
    args = argparse.Namespace(**{**dumps[0]["arguments"], "data": data, "dropout": 0.0})
    if args.tensor > 1:
        raise SystemExit(f"--validate: the parameters in {folder} are cut for --tensor {args.tensor}; only those of "
                         "--tensor 1 can be joined")
    stages, virtual, args.stages, args.interleave = args.stages, args.interleave, 1, None
    torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1, backend="gloo")
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(args.seed)
    model = build(args)[1][0].module
    model = (model if isinstance(model, GPTModel) else model.module).float().eval()
    dataset = Windows(read_text(data), args.length, validation=True)
    tokens, labels = (torch.stack(part) for part in zip(*(dataset[at] for at in range(min(windows, len(dataset))))))
    found = {}
    for name, key in (("first_validation_loss", "initial"), ("final_validation_loss", "parameters")):
        joined = {whole_name(part, dump["stage"], stages, args.blocks, virtual): value.float()
                  for dump in dumps for part, value in dump[key].items()}
        if not args.untied:
            joined.pop("output_layer.weight")  # the embedding's
        missing, unknown = model.load_state_dict(joined, strict=False)
        assert not unknown and not [part for part in missing if "_extra_state" not in part], (missing, unknown)
        with torch.no_grad():
            found[name] = float(forward_step(iter([(tokens, labels)]), model)[0].mean())
    return found


def whole_name(name: str, stage: int, stages: int, layers: int, virtual: int | None) -> str:
    """A parameter's name in the whole model of so many layers, given its name on one of so many stages."""
    chunk, rest = name.split(".", 1) if virtual else ("0", name)
    parts = rest.removeprefix("module.").split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + (int(chunk) * stages + stage) * (layers // (stages * (virtual or 1))))
    return ".".join(parts)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="a text file or a folder of them (default: the standard library)")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages")
    parser.add_argument("--interleave", type=int, help="chunks of each stage (virtual pipelines); at least 2")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks of a worker")
    parser.add_argument("--sequence-parallel", action="store_true", help="cut norms' inputs between them (needs Apex)")
    parser.add_argument("--qk-layernorm", action="store_true", help="norms of queries and keys")
    parser.add_argument("--microbatches", type=int, default=4, help="micro-batches per pipeline and iteration")
    parser.add_argument("--ramp", type=int, nargs="*", default=(), help="those of the first iterations")
    parser.add_argument("--batch", type=int, default=4, help="windows per micro-batch")
    parser.add_argument("--length", type=int, default=64, help="bytes per window")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--untied", action="store_true", help="output layer with weights of its own")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--initial-loss-scale", type=float, default=2.0**16, help="with --fp16: the first one")
    parser.add_argument("--loss-scale", type=float, help="of --fp16 or --bf16: a constant one")
    parser.add_argument("--grad-reduce-in-bf16", action="store_true", help="sum gradients in 16 bits")
    parser.add_argument("--transformer-engine", action="store_true", help="its layers instead of core's own")
    parser.add_argument("--fp8", choices=("tensorwise", "blockwise", "mxfp8", "delayed"),
                        help="with --transformer-engine: the recipe of products in 8 bits")
    parser.add_argument("--recompute", choices=("full", "selective"))
    parser.add_argument("--per-token-loss", action="store_true")
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    parser.add_argument("--moments", choices=("fp32", "bf16"),
                        help="with --distributed-optimizer: the precision-aware one, with such moments")
    parser.add_argument("--distributed-optimizer", action="store_true", help="cut its state into shards")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--min-lr", type=float, help="decay to this (default: no decay)")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--clip", type=float, default=1.0, help="gradient clipping by norm; 0 is none")
    parser.add_argument("--count-zeros", action="store_true", help="count gradients that are zero")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads per worker")
    parser.add_argument("--log-every", type=int, default=5, help="iterations between two log lines")
    parser.add_argument("--eval-every", type=int, default=0, help="iterations between two validations; 0: none")
    parser.add_argument("--eval-iterations", type=int, default=1)
    parser.add_argument("--dump", type=Path, help="folder for each worker's final state")
    parser.add_argument("--validate", type=Path, metavar="DIR", help="only print the validation loss of a dump")
    return parser.parse_args(argv)


def main(argv: list[str]) -> dict[str, Any]:
    """Train, or print the validation loss of an earlier training; returns the worker's state, or the losses."""
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|TensorWrapper)")
    args = parse(argv)
    torch.set_num_threads(args.threads)
    compute_the_same_bits()
    if not torch.cuda.is_available():
        import megatron_cpu  # beside this script

        megatron_cpu.install()
    if args.validate is not None:
        found = validate(args.validate, args.data)
        print(json.dumps({**found, "uniform": math.log(VOCABULARY)}))
        return found
    if torch.cuda.is_available():
        torch.distributed.init_process_group("nccl")
        torch.cuda.set_device(torch.distributed.get_rank() % torch.cuda.device_count())
    else:
        torch.distributed.init_process_group("gloo")
    return train(args)


if __name__ == "__main__":
    main(sys.argv[1:])
