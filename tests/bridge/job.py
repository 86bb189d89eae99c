"""Jobs of Megatron-Bridge's own training loop for tests: a tiny recipe on the CPU, forked from a server of their own
that has imported Bridge."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import popen_forkserver
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_recycle
from tests.harness import Job, Result
from tests.te.job import FOLDER as ENGINE


def recipe(*, stages: int, tensor: int = 1, iterations: int, folder: str, bf16: bool = True, sharded: bool = False,
           virtual: int | None = None, **overrides: Any) -> Any:
    """A configuration of Bridge's; ``overrides`` by their names in it, with two underscores for a dot."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    made = config.ConfigContainer(
        model=GPTModelProvider(
            num_layers=4, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, seq_length=32,
            pipeline_model_parallel_size=stages, tensor_model_parallel_size=tensor,
            virtual_pipeline_model_parallel_size=virtual, attention_dropout=0.0, hidden_dropout=0.0,
            use_cpu_initialization=True, vocab_size=128, make_vocab_size_divisible_by=8,
            gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_activation_fusion=False,
            bias_dropout_fusion=False, apply_rope_fusion=False, share_embeddings_and_output_weights=True),
        train=config.TrainingConfig(train_iters=iterations, global_batch_size=16, micro_batch_size=2),
        validation=config.ValidationConfig(eval_interval=3, eval_iters=1),
        optimizer=OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4, weight_decay=0.01, clip_grad=1.0,
                                  use_distributed_optimizer=sharded),
        scheduler=config.SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=0, lr_decay_iters=iterations,
                                         start_weight_decay=0.01, end_weight_decay=0.01),
        ddp=DistributedDataParallelConfig(
            check_for_nan_in_grad=True, grad_reduce_in_fp32=True, overlap_grad_reduce=sharded,
            overlap_param_gather=sharded, use_distributed_optimizer=sharded),
        dataset=config.GPTDatasetConfig(
            random_seed=1234, seq_length=32, blend=None, blend_per_split=None, split="98,1,1", num_workers=0,
            dataloader_type="single", reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
            path_to_cache=f"{folder}/cache", pin_memory=False, persistent_workers=False),
        logger=config.LoggerConfig(log_interval=1),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=config.CheckpointConfig(save=None, save_interval=None, ckpt_format="torch_dist",
                                           async_save=False),
        rng=config.RNGConfig(seed=1234),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
        mixed_precision="bf16_mixed" if bf16 else None)
    for name, value in overrides.items():
        part, _, field = name.partition("__")
        setattr(getattr(made, part), field, value)
    return made


def train(observer_of: Callable[[str], Any], rank: int, *, stages: int = 2, pipelines: int = 2, tensor: int = 1,
          iterations: int = 4, plugin: bool = True, settings: Mapping[str, Any] | None = None, folder: str = "",
          **more: Any) -> Any:
    """Train the recipe with Bridge's `pretrain`; returns its state and the live workers."""
    from megatron.bridge.training import gpt_step, pretrain
    from megatron.bridge.training import train as loop

    if plugin:
        stage, pipeline, part = rank // (tensor * pipelines), rank // tensor % pipelines, rank % tensor
        name = f"{pipeline}:{stage}" + (f".{part}" if tensor > 1 else "")
        megatron_recycle.enable(observer=observer_of(name))
    seen: dict[str, Any] = {"losses": {}, "norms": {}, "validations": {}}
    step, evaluate, run = loop.train_step, loop.evaluate_and_print_results, pretrain.train

    def train_step(*given: Any) -> Any:
        returned, number = step(*given), int(given[5].train_state.step)
        seen["norms"][number] = float(returned[5])
        if returned[0]:
            seen["losses"][number] = float(returned[0]["lm loss"])
        return returned

    def evaluate_and_print_results(*given: Any, **keywords: Any) -> Any:
        found = evaluate(*given, **keywords)
        if found:
            seen["validations"][int(given[0].train_state.step)] = float(found["lm loss"])
        return found

    def trained(*given: Any, **keywords: Any) -> Any:
        seen.update(model=given[1], optimizer=given[2], state=given[6])
        return run(*given, **keywords)

    loop.train_step, loop.evaluate_and_print_results, pretrain.train = train_step, evaluate_and_print_results, trained
    made = recipe(stages=stages, tensor=tensor, iterations=iterations, folder=folder, **more)
    given = {"heartbeat_interval": 0.2, "heartbeat_timeout": 15.0, "planner_budget": 0.0, "stall_floor": 60.0}
    # As `+env_vars.RECYCLE_REDUCTION=exact` on a recipe's command line.
    made.env_vars = {f"RECYCLE_{key.upper()}": value for key, value in {**given, **(settings or {})}.items()}
    result: dict[str, Any] = {}
    finish = pretrain._finish_train

    def finished(*given: Any) -> None:
        """What there is at the end, before Bridge takes its groups away."""
        result.update(_ending(seen))
        if plugin:
            from megatron.core.pipeline_parallel import get_forward_backward_func

            schedule: Any = get_forward_backward_func()
            result["members"] = [str(worker) for worker in schedule.session.live()]
        finish(*given)

    pretrain._finish_train = finished
    pretrain.pretrain(made, gpt_step.forward_step)
    return result


def _ending(seen: Mapping[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state

    single = seen["optimizer"].chained_optimizers[0]
    return {"losses": seen["losses"], "norms": seen["norms"], "validations": seen["validations"],
            "stage": parallel_state.get_pipeline_model_parallel_rank(),
            "pipeline": int(os.environ["RANK"]) // parallel_state.get_tensor_model_parallel_world_size() % 2,
            "counters": {name: float(value) for name, value in seen["state"].train_state.state_dict().items()},
            "parameters": {f"{number}.{name}": value.detach().float().numpy().copy()
                           for number, model in enumerate(seen["model"]) for name, value in model.named_parameters()},
            "state": [{key: value.float().numpy().copy() for key, value in one.items() if hasattr(value, "float")}
                      for one in single.optimizer.state.values()]}


@cache
def _server(engine: Path, bridge: str) -> ForkServer:
    """What has imported Bridge on the Transformer Engine in the folder ``engine``."""
    server = ForkServer()
    server.set_forkserver_preload(["tests.bridge.preload", "tests.preload"])
    with mock.patch.dict(os.environ, {ENGINE: str(engine), "MEGATRON_BRIDGE": bridge}):
        server.ensure_running()
    return server


class BridgeJob(Job):
    """A job of `train` on the Transformer Engine in ``engine``."""

    def __init__(self, engine: Path, size: int, arguments: Mapping[str, Any], holds: Any = (), **more: Any) -> None:
        super().__init__(train, size, arguments, holds, **{"rules": None, "limit": 200.0, **more})
        self._server = _server(engine, os.environ["MEGATRON_BRIDGE"])

    def _start(self, rank: int, holds: Any, arguments: Mapping[str, Any], joining: bool = False) -> Any:
        with mock.patch.object(popen_forkserver.forkserver, "connect_to_new_process",
                               self._server.connect_to_new_process):
            return super()._start(rank, holds, arguments, joining)


def ended(job: BridgeJob) -> dict[int, Result]:
    """The results of a job of which all end well."""
    results = job.wait()
    assert all(result.status == 0 and not result.error for result in results.values()), job.where()
    return results

