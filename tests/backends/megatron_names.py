"""All that the Megatron backend uses of megatron-core, Megatron-LM, Megatron-Bridge and Transformer Engine, with the
releases that have it."""

from __future__ import annotations

from collections.abc import Sequence

from tests.backends.private_names import Private

CORE: Sequence[Private] = (
    Private("megatron.core.parallel_state", "_DATA_PARALLEL_GROUP _DATA_PARALLEL_GROUP_WITH_CP "
            "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP _EXPERT_DATA_PARALLEL_GROUP _MODEL_PARALLEL_GROUP"),
    Private("megatron.core.parallel_state", "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT "
            "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT "
            "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", since=(0, 19)),
    Private("megatron.core.parallel_state", "_MPU_DATA_PARALLEL_WORLD_SIZE _MPU_DATA_PARALLEL_RANK "
            "_MPU_PIPELINE_MODEL_PARALLEL_RANK _TENSOR_MODEL_PARALLEL_GROUP initialize_model_parallel "
            "is_pipeline_first_stage is_pipeline_last_stage get_data_parallel_group get_data_parallel_rank "
            "get_data_parallel_world_size get_pipeline_model_parallel_group get_pipeline_model_parallel_rank "
            "get_pipeline_model_parallel_world_size get_tensor_model_parallel_group get_tensor_model_parallel_rank "
            "get_tensor_model_parallel_world_size get_context_parallel_world_size "
            "get_expert_model_parallel_world_size get_virtual_pipeline_model_parallel_world_size"),
    Private("megatron.core.package_info", "__version__"),
    Private("megatron.core.timers", "Timer.start Timer.stop Timers.log Timers._get_elapsed_time_all_ranks"),
    Private("megatron.core.process_groups_config", "ProcessGroupCollection.use_mpu_process_groups "
            "ProcessGroupCollection.pp"),
    Private("megatron.core.utils", "get_attr_wrapped_model get_model_config get_model_type get_pg_rank get_te_version "
            "unwrap_model"),
    Private("megatron.core.pipeline_parallel.schedules", "forward_step backward_step deallocate_output_tensor "
            "get_forward_backward_func"),
    Private("megatron.core.distributed.finalize_model_grads", "finalize_model_grads"),
    Private("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel.buffers "
            "DistributedDataParallel.expert_parallel_buffers DistributedDataParallel.param_to_bucket_group"),
    Private("megatron.core.distributed.param_and_grad_buffer", "_ParamAndGradBuffer.buckets "
            "_ParamAndGradBuffer.param_index_map _ParamAndGradBuffer.data_parallel_group "
            "_ParamAndGradBuffer.grad_data _ParamAndGradBuffer.numel_unpadded "
            "_ParamAndGradBuffer.param_dtype _ParamAndGradBuffer.grad_dtype _ParamAndGradBucket.grad_data "
            "_ParamAndGradBucket.offset _ParamAndGradBucket.numel_unpadded"),
    Private("megatron.core.optimizer.clip_grads", "l2_norm_impl multi_tensor_applier multi_tensor_scale_impl"),
    Private("megatron.core.optimizer.optimizer", "ChainedOptimizer.chained_optimizers "
            "Float16OptimizerWithFloat16Params FP32Optimizer MegatronOptimizer.get_grad_norm "
            "MegatronOptimizer.clip_grad_norm MegatronOptimizer.count_zeros MegatronOptimizer.step_with_ready_grads "
            "MegatronOptimizer.get_parameters MegatronOptimizer.scale_loss MegatronOptimizer.reload_model_params"),
    Private("megatron.core.optimizer.optimizer", "MegatronOptimizer.has_grad_norm_group", since=(0, 19)),
    Private("megatron.core.optimizer.optimizer", "MixedPrecisionOptimizer.grad_scaler "
            "MixedPrecisionOptimizer.found_inf MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan "
            "Float16OptimizerWithFloat16Params._collect_main_grad_data_for_unscaling"),
    Private("megatron.core.optimizer.grad_scaler", "MegatronGradScaler.scale MegatronGradScaler.inv_scale "
            "MegatronGradScaler._scale MegatronGradScaler.update MegatronGradScaler.load_state_dict "
            "DynamicGradScaler._growth_tracker DynamicGradScaler._hysteresis_tracker"),
    Private("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer._build_gbuf_range_map "
            "DistributedOptimizer._build_model_param_gbuf_map DistributedOptimizer.gbuf_ranges "
            "DistributedOptimizer.model_param_gbuf_map DistributedOptimizer.model_param_group_index_map "
            "DistributedOptimizer.opt_group_ranges DistributedOptimizer.buffers "
            "DistributedOptimizer.data_parallel_group DistributedOptimizer.data_parallel_group_gloo "
            "DistributedOptimizer.distributed_optimizer_instance_id DistributedOptimizer.ddp_config "
            "DistributedOptimizer.model_float16_groups DistributedOptimizer.model_fp32_groups "
            "DistributedOptimizer.shard_float16_groups DistributedOptimizer.shard_fp32_groups "
            "DistributedOptimizer.shard_fp32_from_float16_groups DistributedOptimizer.state_dict "
            "DistributedOptimizer.load_state_dict DistributedOptimizer.sharded_state_dict "
            "DistributedOptimizer.get_parameter_state_dp_zero DistributedOptimizer.save_parameter_state "
            "DistributedOptimizer.load_parameter_state DistributedOptimizer.checkpoint_fully_reshardable_formats "
            "DistributedOptimizer._get_main_param_and_optimizer_states "
            "DistributedOptimizer._set_main_param_and_optimizer_states "
            "DistributedOptimizer.load_parameter_state_from_dp_reshardable "
            "DistributedOptimizer.load_parameter_state_from_fully_reshardable "
            "DistributedOptimizer.load_parameter_state_from_fs_model_space"),
    Private("megatron.core.tensor_parallel.layers", "LinearWithGradAccumulationAndAsyncCommunication.forward "
            "LinearWithGradAccumulationAndAsyncCommunication.backward param_is_not_tensor_parallel_duplicate"),
    Private("megatron.core.tensor_parallel.random", "get_cuda_rng_tracker"),
    Private("megatron.core.extensions.transformer_engine", "TELinear.is_first_microbatch "
            "TELinear.disable_parameter_transpose_cache TELinear.te_quant_params "
            "TELayerNormColumnParallelLinear.is_first_microbatch "
            "TELayerNormColumnParallelLinear.disable_parameter_transpose_cache TEColumnParallelLinear "
            "TERowParallelLinear TEDotProductAttention"),
    Private("megatron.core.transformer.enums", "AttnMaskType"),
    Private("megatron.core.transformer.identity_op", "IdentityOp"),
    Private("megatron.core.transformer.module", "param_is_not_shared"),
    Private("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper.tracker"),
    Private("megatron.core.transformer.spec_utils", "build_module"),
    Private("megatron.core.transformer.transformer_block", "TransformerBlock.layers TransformerBlock.pg_collection "
            "TransformerBlock.vp_stage TransformerBlock.submodules TransformerBlock.num_layers_per_pipeline_rank "
            "TransformerBlock.forward get_transformer_layer_offset get_num_layers_to_build"),
    Private("megatron.core.transformer.transformer_layer", "TransformerLayer.self_attention "
            "TransformerLayer.cross_attention get_transformer_layer_offset"),
    Private("megatron.core.models.common.language_module.language_module",
            "LanguageModule.setup_embeddings_and_output_layer LanguageModule.pg_collection "
            "LanguageModule.tie_embeddings_and_output_weights_state_dict "
            "LanguageModule.shared_embedding_or_output_weight"),
    Private("megatron.core.models.gpt.gpt_model", "GPTModel.forward GPTModel._preprocess GPTModel._postprocess "
            "GPTModel.share_embeddings_and_output_weights"),
    Private("megatron.core.dist_checkpointing.strategies.async_utils", "TemporalAsyncCaller.process "
            "TemporalAsyncCaller.schedule_async_call TemporalAsyncCaller.close AsyncRequest.finalize_fns"),
    Private("megatron.core.dist_checkpointing.strategies.filesystem_async", "_results_queue"),
)
"""Of the package megatron-core."""

LOOP: Sequence[Private] = (
    Private("megatron.training.arguments", "add_megatron_arguments"),
    Private("megatron.training.global_vars", "set_global_variables get_args get_tensorboard_writer get_wandb_writer "
            "_set_tensorboard_writer _set_wandb_writer"),
    Private("megatron.training.training", "train train_step training_log evaluate load_checkpoint save_checkpoint "
            "maybe_finalize_async_save compute_throughputs_and_append_to_progress_log print_rank_last get_args "
            "get_timers get_tensorboard_writer get_wandb_writer is_last_rank get_one_logger one_logger_utils mpu "
            "write_args_to_tensorboard update_num_microbatches get_rerun_state_machine num_floating_point_operations "
            "preprocess_common_state_dict cyclic_iter reduce_max_stat_across_model_parallel_group "
            "get_forward_backward_func dummy_train_step evaluate_and_print_results get_num_microbatches"),
    Private("megatron.training.checkpointing", "save_checkpoint load_checkpoint get_checkpoint_name read_metadata "
            "wandb_utils schedule_async_save get_loaded_iteration set_loaded_iteration "
            "_load_base_checkpoint _NON_PERSISTENT_CKPT_SUBDIR"),
    Private("megatron.training.checkpointing", "open_file", before=(0, 19)),
    Private("megatron.training.checkpointing", "maybe_msc", since=(0, 19)),
    Private("megatron.training.one_logger_utils", "get_one_logger"),
    Private("megatron.training.utils", "average_losses_across_data_parallel_group"),
    Private("megatron.training.wandb_utils", "on_save_checkpoint_success"),
)
"""Of Megatron-LM: its training loop, which is beside the core in a checkout, and since 0.17 in that package too."""

BRIDGE: Sequence[Private] = (
    Private("megatron.bridge.package_info", "__version__"),
    Private("megatron.bridge.training.setup", "setup _should_load_checkpoint"),
    Private("megatron.bridge.training.train", "train train_step get_num_microbatches get_rerun_state_machine "
            "flop_utils"),
    Private("megatron.bridge.training.checkpointing", "save_checkpoint load_checkpoint update_num_microbatches "
            "get_checkpoint_name get_checkpoint_train_state_filename get_checkpoint_tracker_filename print_rank_0 "
            "cleanup_old_non_persistent_checkpoint wandb_utils mlflow_utils comet_utils _NON_PERSISTENT_CKPT_SUBDIR"),
    Private("megatron.bridge.training.utils.train_utils", "training_log reduce_max_stat_across_model_parallel_group"),
    Private("megatron.bridge.training.utils.flop_utils", "num_floating_point_operations"),
    Private("megatron.bridge.training.state", "TrainState.step TrainState.consumed_train_samples "
            "TrainState.skipped_train_samples TrainState.consumed_valid_samples "
            "TrainState.floating_point_operations_so_far GlobalState.train_state GlobalState.cfg GlobalState.timers"),
    Private("megatron.bridge.utils.common_utils", "print_rank_last"),
    Private("megatron.bridge.training.utils.wandb_utils", "on_save_checkpoint_success"),
    Private("megatron.bridge.training.utils.mlflow_utils", "on_save_checkpoint_success"),
    Private("megatron.bridge.training.utils.comet_utils", "on_save_checkpoint_success"),
)
"""Of Megatron-Bridge."""

ENGINE: Sequence[Private] = (
    Private("transformer_engine.pytorch.module.linear", "Linear.wgrad_store Linear.fuse_wgrad_accumulation"),
    Private("transformer_engine.pytorch.module.layernorm_linear", "LayerNormLinear.wgrad_store "
            "LayerNormLinear.fuse_wgrad_accumulation"),
    Private("transformer_engine.pytorch.module.grouped_linear", "GroupedLinear.wgrad_store "
            "GroupedLinear.fuse_wgrad_accumulation GroupedLinear.num_gemms"),
    Private("transformer_engine.pytorch.optimizers.fused_adam", "FusedAdam.name_to_dtype_map FusedAdam.master_weights "
            "FusedAdam.use_decoupled_grad FusedAdam.store_param_remainders FusedAdam._scales"),
    Private("transformer_engine.pytorch.tensor.float8_tensor", "Float8CurrentScalingQuantizer.amax_reduction_group"),
    *(Private(f"transformer_engine.pytorch.tensor.storage.{module}", f"{kind}.get_data_tensors")
      for module, kind in (("float8_tensor_storage", "Float8TensorStorage"),
                           ("float8_blockwise_tensor_storage", "Float8BlockwiseQTensorStorage"),
                           ("mxfp8_tensor_storage", "MXFP8TensorStorage"))),
    Private("transformer_engine.pytorch.module._common", "WeightGradStore.delay_wgrad_compute WeightGradStore.put"),
    Private("transformer_engine.pytorch.module.base", "TransformerEngineBaseModule.tp_group "
            "TransformerEngineBaseModule.quantizers"),
)
"""Of Transformer Engine."""
