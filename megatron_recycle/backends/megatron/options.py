"""Megatron's options: the ones that this plugin takes over, changes or refuses; the only table of them.

An option not listed here is accepted as it is. An option that changes no result, but needs all ranks between iterations
or bypasses the plan, is changed, with a log line. An option that cannot be kept right is refused with its remedy. Names
are those of Megatron-LM's arguments and of core's configurations alike, so that one table serves both: the arguments as
soon as they are parsed, and the configurations of a script without arguments at its first iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_MISSING = object()
_REPLAYED = "a graph replays one worker's own micro-batches in fixed buffers, and others' may come; leave them off"


@dataclass(frozen=True)
class Option:
    """The treatment of one option.

    Attributes:
        names: of the attribute; several, separated by blanks, are treated alike.
        then: the advice, or the reason for the change.
        wrong: tells unsupported values; others are accepted.
        becomes: the value that it is set to; without one it is refused.
        title: in messages; by default its name and value.
    """

    names: str
    then: str
    wrong: Callable[[Any], bool] = bool
    becomes: Any = _MISSING
    title: str | None = None


def _several(value: Any) -> bool:
    return value is not None and value > 1


def _given(value: Any) -> bool:
    return value is not None


_SCALED = ("fp16", "fp8", "torch.float16", "torch.uint8")
"""Types of optimizer state that need a scale, by their names in arguments and in configurations."""
ANYWHERE = (
    Option("context_parallel_size", "set context_parallel_size to 1", _several, title="context parallelism"),
    Option("hybrid_context_parallel", "samples would be cut between ranks by their length, each micro-batch anew; "
           "leave it off"),
    Option("expert_model_parallel_size", "use dense layers", _several, title="expert parallelism"),
    Option("gtp_weight_remat_size expert_gtp_weight_remat_size", "its peers' gradients would be reduced with the "
           "others'; leave it unset", _several, title="weights that are cut once more (GTP)"),
    Option("num_moe_experts num_experts", "use dense layers", title="experts"),
    Option("exp_avg_dtype exp_avg_sq_dtype", "only fp32 and bf16 have no scale of their own, which each shard would "
           "need; use bf16", lambda kind: str(kind) in _SCALED),
    Option("main_params_dtype", "masters have 32 bits; leave it at fp32",
           lambda kind: str(kind) in _SCALED),
    Option("reuse_grad_buf_for_mxfp8_param_ag", "gradients do not lie in Megatron's buffers; leave it off"),
    Option("param_name_patterns_for_fp32_local_accumulation", "gradients of one stage are summed in one type; set "
           "grad_reduce_in_fp32 (--accumulate-allreduce-grads-in-fp32) instead"),
    Option("use_layer_wise_distributed_optimizer", "its state is cut by layers; use the distributed optimizer"),
    Option("grad_norm_skip_threshold", "leave it out: a step is made before its gradient norm is looked at",
           lambda limit: limit is not None and math.isfinite(limit)),
    Option("optimizer_cuda_graph", _REPLAYED, title="CUDA graphs"),
    *(Option(name, f"leave {name} out", title="fully sharded data parallelism")
      for name in ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")),
    Option("optimizer", "use one of Megatron's plain ones (--optimizer adam or sgd)",
           lambda name: name not in ("adam", "sgd")),
    Option("optimizer_cpu_offload", "its state is spread over several optimizers; leave it off"),
    Option("fp4", "its kernels round gradients by random numbers of their own, so that an iteration begun again would "
           "differ, and nothing of it has run; use bf16, or fp8 with another recipe than delayed"),
    Option("fp8_param fp8_param_gather", "parameters themselves would have 8 bits, which no copy of a stage's state "
           "carries; leave it out"),
    Option("fp8_dot_product_attention fp8_multi_head_attention", "attention in 8 bits was not tried; leave it out"),
    Option("enable_autocast", "use bf16"),
    Option("mtp_standalone", "messages between stages would have another shape behind it; give the layout a last stage "
           "that has them and the loss (mL)", title="multi-token prediction on another stage than the loss"),
    Option("mtp_detach_heads", "their gradients would be clipped by a norm of their own; leave it off"),
    Option("cuda_graph_impl", _REPLAYED, lambda kind: kind not in (None, "none"), title="CUDA graphs"),
    Option("enable_cuda_graph external_cuda_graph", _REPLAYED, title="CUDA graphs"),
    Option("variable_seq_lengths", "messages between stages have one shape; use one length for all micro-batches"),
    Option("num_microbatches_with_partial_activation_checkpoints", "leave it unset", _given),
    Option("fine_grained_activation_offloading", "a W that runs later would find its input moved away; leave it off"),
    Option("has_cond_embedder", "their gradients cross all stages", title="conditional embedders"),
    # From here on no result changes. overlap_grad_reduce is set to True, since the distributed optimizer's buckets, and
    # so its checkpoints, depend on it.
    Option("overlap_grad_reduce", "gradients are reduced when the plan says so", becomes=True),
    Option("overlap_param_gather overlap_param_gather_with_optimizer_step",
           "parameters are gathered when a step is final", becomes=False),
    Option("overlap_p2p_comm overlap_p2p_comm_warmup_flush",
           "activations and gradients travel beside computation in any case", becomes=False),
    Option("defer_embedding_wgrad_compute", "the plan defers all weight gradients", becomes=False),
    Option("test_mode", "in each forward it compares norms of queries and keys with ranks that may be gone; "
           "--recycle-verify-every N (RECYCLE_VERIFY_EVERY) compares all that peers hold", becomes=False),
    Option("check_for_large_grads", "it looks at each rank's own sums, which depend on who computes what",
           becomes=False),
)
"""Options of the model, of data parallelism and of the optimizer."""

OF_THE_LOOP = (
    Option("skip_train", "nothing is trained, so that there is nothing to keep going: start it without the plugin "
           "(torchrun, or RECYCLE_ENABLED=false)"),
    Option("transformer_impl", "use local or transformer_engine",
           lambda kind: kind not in (None, "local", "transformer_engine")),
    # Options for Transformer Engine's layers only.
    Option("multi_latent_attention", "core's local layers have none; leave --multi-latent-attention out"),
    Option("experimental_attention_variant", "core's local layers have none; leave it out", _given),
    Option("qk_l2_norm", "core's local layers would train without it; leave --qk-l2-norm out"),
    Option("spec", "core builds them of Transformer Engine's; use another model",
           lambda spec: bool(spec) and spec[0].startswith("megatron.core.models.mamba."), title="Mamba layers"),
    Option("step_batch_size_schedule", "how many micro-batches an iteration will have at most must be known at the "
           "start; use --rampup-batch-size", _given),
    Option("start_eval_at_iter", "a last checkpoint counts evaluations from the first iteration; leave it out", _given),
    *(Option(name, "each rank's file has the micro-batches of its own pipeline, and who is left computes others' too; "
             f"leave --{name.replace('_', '-')} out", _given) for name in ("logits_save_dir", "logits_load_dir")),
    Option("dataloader_inter_document_masking", "leave it out: data would be read in the middle of the model"),
    Option("freeze_all_layers", "nothing is trained, so that there is nothing to keep going: start it without the "
           "plugin (torchrun, or RECYCLE_ENABLED=false)"),
    Option("qk_clip", "weights would be clipped outside of the step, by what each worker's own micro-batches have "
           "shown; leave --qk-clip out"),
    Option("dsa_indexer_loss_coeff", "its loss is summed over ranks that may be gone; leave it out"),
    Option("vision_pretraining_type", "its teacher changes outside of the optimizer's step; use another type",
           lambda kind: kind == "dino"),
    Option("use_pytorch_profiler", "leave --use-pytorch-profiler out: the processes that it watched have ended in a "
           "damaged heap under this plugin; profile a run without it (torchrun, or RECYCLE_ENABLED=false)"),
    Option("perform_rl_step", "its rollouts ask all ranks for samples between iterations, and weights are handed to an "
           "engine that knows nothing of who is left; leave --perform-rl-step out"),
    Option("adlr_autoresume", "it ends the job to start it again; leave it out: `recycle run --job-restarts N` does"),
    Option("inprocess_restart", "leave --inprocess-restart out: this plugin does that"),
    Option("enable_ft_package", "leave --enable-ft-package out: this plugin does that"),
    Option("rerun_mode", "leave it out: iterations are not run twice to compare them",
           lambda mode: mode == "report_determinism_stats"),
    # From here on no result changes.
    Option("rerun_mode", "a re-run inside the loop would repeat a committed step", lambda mode: mode != "disabled",
           "disabled"),
    Option("error_injection_rate", "it tries re-runs, which are off", becomes=0),
    Option("log_max_attention_logit", "each worker would log that of the micro-batches it has computed", becomes=False),
    Option("save_wgrads_interval save_dgrads_interval save_activations_interval save_params_interval "
           "save_tokens_per_expert_interval", "each rank would write what it has computed itself, which depends on who "
           "is left", _given, None),
    Option("log_params_norm log_energy", "it is summed over ranks that may be gone", becomes=False),
    Option("log_straggler", "it gathers from ranks that may be gone; slow workers are reported by the plugin",
           becomes=False),
    Option("check_weight_hash_across_dp_replicas_interval", "it gathers from ranks that may be gone; "
           "--recycle-verify-every N (RECYCLE_VERIFY_EVERY) compares parameters and optimizer state of who is left",
           _given, None),
    Option("gpu_sniff_test_interval", "it asks ranks that may be gone", _given, None),
    Option("distributed_timeout_seconds_after_init", "groups come and go with failures; --recycle-transport-timeout is "
           "their limit", _given, None),
)
"""Options of Megatron-LM's training loop."""

OF_BRIDGE = (
    Option("use_decentralized_pg", "process groups that parallel_state does not know would not be renewed after a "
           "failure; leave dist.use_decentralized_pg out"),
    Option("use_megatron_fsdp", "parameters are sharded; leave dist.use_megatron_fsdp out"),
    Option("use_torch_fsdp2", "parameters are sharded; leave dist.use_torch_fsdp2 out"),
    Option("dataloader_type", "a global batch is taken at once, by each rank for itself; use single or cyclic",
           lambda kind: kind not in (None, "single", "cyclic")),
    Option("packed_sequence_specs", "lengths of sequences are added up over ranks that may be gone; leave it out",
           _given),
    Option("rampup_batch_size", "it is not supported under Bridge yet; leave train.rampup_batch_size out", _given),
    Option("exit_signal_handler_for_dataloader", "leave it out: data is read by the workers themselves"),
    Option("custom_manager_class", "checkpoints of a manager of your own are not supported; leave it out", _given),
    Option("also_save_hf_checkpoint", "its weights are gathered from ranks that may be gone; leave it out, and convert "
           "a checkpoint afterwards"),
    Option("ckpt_format", "use torch_dist", lambda kind: kind not in (None, "torch_dist")),
    Option("non_persistent_ckpt_type", "it needs all workers; use global", lambda kind: kind == "local"),
    Option("enabled", "this plugin does that; leave inprocess_restart, nvrx_straggler and tensor_inspect out"),
    Option("num_epochs", "give train.train_iters", _given),
    # From here on no result changes.
    Option("async_save", "checkpoints are written at once under Bridge", becomes=False),
    Option("log_memory_to_tensorboard", "it is compared over stages, which would wait for each other", becomes=False),
    Option("train_sync_interval", "the plugin waits for the device itself", _given, None),
)
"""Options of Megatron-Bridge's loop."""

ALL_AT_ONCE = Option("async_save", "it is there for --ckpt-format torch_dist; checkpoints are written at once",
                     becomes=False)
"""Option of the loop, where checkpoints cannot be written beside training."""
BY_CORE = Option("async_strategy", "another writer would name a checkpoint that lacks files of who is gone; core's own "
                 "writes it", lambda kind: kind not in (None, "mcore"), "mcore")
"""Option of the loop, where checkpoints are written beside training."""


_OF_V = (
    Option("ckpt_format", "which layers are in a file per stage depends on the stages; use --ckpt-format torch_dist",
           lambda kind: kind != "torch_dist"),
    Option("non_persistent_ckpt_type", "which layers are in it depends on the stages; use global",
           lambda kind: kind == "local"),
    Option("mtp_num_layers", "its copy of the embedding would be beside the embedding; leave chunks out",
           title="multi-token prediction"),
    Option("tensorboard_dir wandb_project", "Megatron writes it on the last rank, which has no loss with chunks 2; "
           "leave it out"),
)
"""Options of the loop, with this plugin's own chunks."""


def apply(options: Sequence[Option], settings: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Judge ``settings`` (objects with options as attributes), and change options in them where needed.

    Returns:
        Refusals, and changed options: a line each, once.
    """
    refused: dict[str, None] = {}
    changed: dict[str, None] = {}
    for option, name in [(one, name) for one in options for name in one.names.split()]:
        for holder in settings:
            value = getattr(holder, name, _MISSING)
            if value is _MISSING or not option.wrong(value):
                continue
            if option.becomes is _MISSING:
                refused[f"{option.title or _named(name, value)}: {option.then}"] = None
                continue
            setattr(holder, name, option.becomes)
            changed[f"{_named(name, value)} is off under recycle: {option.then}"] = None
    return list(refused), list(changed)


def with_history(settings: Any) -> list[str]:
    """Refusals of 8-bit recipes whose scales depend on earlier results; ``settings``: the loop's arguments, or the
    model's configuration."""
    fp8, recipe = getattr(settings, "fp8", None), getattr(settings, "fp8_recipe", None)
    if not fp8 or recipe in _SCALED_AT_ONCE:
        return []
    return [f"fp8 {fp8} with fp8_recipe {recipe}: its scales come from micro-batches before, of all pipelines, in an "
            f"order that no plan keeps; use --fp8-recipe {', '.join(_SCALED_AT_ONCE)}, or bf16"]


_SCALED_AT_ONCE = ("tensorwise", "blockwise", "mxfp8")
"""Recipes that scale each tensor by its own content, without history."""


def other_evaluations(arguments: Any) -> list[str]:
    """Refusals of evaluation batches unlike training's; the loop's ``arguments`` name them since core 0.18."""
    return [f"eval_{name} {given} where {name} is {own}: an evaluation has training's batches; leave it out"
            for name in ("global_batch_size", "micro_batch_size")
            if (given := getattr(arguments, f"eval_{name}", None)) is not None
            and (own := getattr(arguments, name)) != given]


def v_shaped(arguments: Any) -> tuple[list[str], list[str]]:
    """Judge Megatron-LM's ``arguments`` of a job with this plugin's own ``chunks: 2``, and have two chunks built on
    each stage. Refusals and lines as those of `apply`."""
    refused, changed = apply(_OF_V, [arguments])
    chunks, stages = arguments.virtual_pipeline_model_parallel_size, arguments.pipeline_model_parallel_size
    if chunks not in (None, 2) or (chunks is None and arguments.pipeline_model_parallel_layout is not None):
        refused.append(f"chunks 2 with {chunks or 1} virtual stages per pipeline rank: leave those out, or have two "
                       "(--num-virtual-stages-per-pipeline-rank 2, or a --pipeline-model-parallel-layout of twice as "
                       "many parts as there are stages); the second ones go up the stages again")
    if stages == 1:
        refused.append("chunks 2 with one stage, which has no way back to go: leave chunks out")
    layers = arguments.num_layers + sum(bool(getattr(arguments, f"account_for_{what}_in_pipeline_split", False))
                                        for what in ("embedding", "loss"))
    uneven = [getattr(arguments, name, None) for name in (
        "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")]
    if all(one is None for one in uneven) and layers % (2 * stages):
        refused.append(f"chunks 2 with {layers} layers on {stages} stages: each has two chunks, so let their number be "
                       f"a multiple of {2 * stages}, or give a --pipeline-model-parallel-layout")
    if not refused:
        arguments.virtual_pipeline_model_parallel_size = 2
        if arguments.use_distributed_optimizer and not arguments.dist_ckpt_optim_fully_reshardable:
            arguments.dist_ckpt_optim_fully_reshardable = True
            changed.append("dist_ckpt_optim_fully_reshardable is on with chunks 2: the other kind of checkpoint does "
                           "not tell whose state it has")
    return refused, changed


def message(refused: Sequence[str]) -> str:
    """The message to a user about all ``refused`` options."""
    return ("megatron-recycle does not support this configuration yet:\n- " + "\n- ".join(refused)
            + "\nTo train without the plugin leave --recycle out (or set RECYCLE_ENABLED=false).")


def _named(name: str, value: Any) -> str:
    return name if value is True else f"{name} {value}"
