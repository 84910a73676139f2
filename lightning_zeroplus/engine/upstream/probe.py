"""What the engine relies on inside DeepSpeed, checked before anything is built on it.

The engine overrides methods of DeepSpeed that are not public. If a release has renamed one, the override would never be
called, and gradients would be lost silently. So every override is listed here with what it relies on: that upstream has
the method, that upstream calls it from where we expect, and which attributes upstream keeps. If one is missing, the
release is refused; the error names the version and what is missing. Versions are never compared.
"""

from __future__ import annotations

import functools

from lightning_zeroplus.internals.probe import Probe

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_ZERO12 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_ZERO3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_BUCKET = "deepspeed.runtime.zero.stage_1_and_2.IPGBucket"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
#: Of the decorator that marks a pass for profilers on a GPU.
_MARKS = "__qualname__ _range_pop _range_push enable_nvtx get_accelerator is_compiling"


class UnsupportedDeepSpeedError(RuntimeError):
    """The installed DeepSpeed lacks something that the engine relies on."""


#: What the engine needs; a DeepSpeed without it is refused.
REQUIRED = (
    Probe(
        "several backwards per step",
        (0, 1, 2, 3),
        _ENGINE,
        methods="""is_gradient_accumulation_boundary _backward_epilogue allreduce_gradients backward step destroy
            load_checkpoint fp16_enabled get_global_grad_norm no_sync zero_reduce_bucket_size""",
        attributes="""_running_engine_backward _support_torch_style_backward _global_grad_norm basic_optimizer
            module_forward_pre_hook module_forward_post_hook""",
        calls=(
            ("backward", "_backward_epilogue"),
            ("_backward_epilogue", "allreduce_gradients"),
            ("allreduce_gradients", "is_gradient_accumulation_boundary"),
            ("step", "is_gradient_accumulation_boundary"),
        ),
    ),
    Probe(
        "a forward under the autocast of its caller",
        (0, 1, 2, 3),
        _ENGINE,
        methods="torch_autocast_enabled torch_autocast_dtype",
        calls=(("forward", "autocast_if_enabled"),),
    ),
    Probe(
        "a loss scale for fp32 weights",
        (0, 1, 2, 3),
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        methods="update_scale",
        attributes="cur_scale",
        calls=(("update_scale", "last_overflow_iter"),),
    ),
    Probe(
        "reduction without sharding",
        (0,),
        _ENGINE,
        methods="buffered_allreduce_fallback allreduce_bucket _reduce_non_expert_gradients allreduce_no_retain",
        calls=(
            ("allreduce_bucket", "communication_data_type"),
            ("buffered_allreduce_fallback", "_reduce_non_expert_gradients"),
        ),
    ),
    Probe(
        "clipping in fp16 and bf16 without sharding",
        (0,),
        "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer",
        methods="unscale_and_clip_grads zero_grad _update_scale",
        attributes="clip_grad loss_scale",
        calls=(("step", "unscale_and_clip_grads"), ("unscale_and_clip_grads", "clip_grad")),
    ),
    Probe(
        "bf16 with fp32 accumulation at stage 1",
        (1,),
        "deepspeed.runtime.bf16_optimizer.BF16_Optimizer",
        methods="clear_lp_grads zero_grad get_grads_for_reduction",
        attributes="""fp32_groups_gradients_flat fp32_groups_gradients bf16_groups bf16_partitioned_groups
            fp32_groups_flat_partition clip_grad""",
        calls=(("step", "clip_grad"),),
    ),
    Probe(
        "accumulation at ZeRO 1 and 2",
        (1, 2),
        _ZERO12,
        methods="""independent_gradient_partition_epilogue process_gradients unscale_and_clip_grads reduce_ipg_grads
            get_gradient_for_reduction
            async_accumulate_grad_in_cpu_via_gpu copy_grads_in_partition clear_grad_attribute get_param_comm_dtype
            _release_ipg_buffers reset_cpu_buffers get_param_id update_offload_overflow_tracker scaled_global_norm
            has_overflow zero_grad _optimizer_step _update_scale""",
        attributes="""ready_for_gradients micro_step_id partition_gradients cpu_offload bit16_groups param_id
            round_robin_bit16_groups params_in_partition partition_size grad_start_offset
            grad_partition_insertion_offset param_to_partition_ids dp_process_group reduce_scatter reduce_bucket_size
            grad_position single_partition_of_fp32_groups use_grad_accum_attribute gradient_accumulation_dtype
            all_grad_tensors averaged_gradients ipg_buckets extra_large_param_to_reduce previous_reduced_grads
            params_already_reduced norm_for_param_grads clip_grad has_moe_layers""",
        calls=(
            ("create_gradient_handling_hooks", "process_gradients"),
            ("overlapping_partition_gradients_reduce_epilogue", "independent_gradient_partition_epilogue"),
            ("step", "unscale_and_clip_grads"),
            ("step", "averaged_gradients"),
            ("step", "_optimizer_step"),
            ("step", "scaled_global_norm"),
            ("unscale_and_clip_grads", "clip_grad"),
            ("reduce_independent_p_g_buckets_and_remove_grads", "get_param_comm_dtype"),
        ),
    ),
    Probe(
        "accumulation at ZeRO 3",
        (3,),
        _ZERO3,
        methods="""partition_grads reduce_ready_partitions_and_remove_grads get_param_comm_dtype reset_cpu_buffers
            unscale_and_clip_grads independent_gradient_partition_epilogue _swappable_optimizer_subgroup get_param_id
            _get_norm_groups zero_grad _prepare_fp32_grad_for_sub_group _post_step _optimizer_step _update_scale
            has_overflow""",
        attributes="""leaf_parameters dp_process_group reduce_scatter reduce_bucket_size micro_step_id
            averaged_gradients fp16_groups offload_optimizer grad_position fp32_partitioned_groups_flat ipg_buckets
            contiguous_gradients gradient_accumulation_dtype clip_grad reduce_and_partition_stream
            persistent_parameters""",
        calls=(
            ("create_reduce_and_remove_grad_hooks", "reduce_ready_partitions_and_remove_grads"),
            ("reduce_independent_p_g_buckets_and_remove_grads", "get_param_comm_dtype"),
            ("__reduce_and_partition_ipg_grads", "partition_grads"),
            ("partition_grads", "micro_step_id"),
            ("step", "unscale_and_clip_grads"),
            ("step", "_get_norm_groups"),
            ("step", "_post_step"),
            ("step", "_optimizer_step"),
            ("_prepare_fp32_grad_for_sub_group", "flatten"),
            ("unscale_and_clip_grads", "clip_grad"),
        ),
    ),
    Probe(
        "a loss scale for fp32 weights at ZeRO 1 and 2",
        (1, 2),
        _ZERO12,
        attributes="overflow",
        calls=(("step", "check_grad_overflow"), ("_update_scale", "loss_scaler")),
    ),
    Probe(
        "a loss scale for fp32 weights at ZeRO 3",
        (3,),
        _ZERO3,
        methods="check_overflow",
        attributes="overflow",
        calls=(("step", "_overflow_check_and_loss_scale_update"), ("_update_scale", "loss_scaler")),
    ),
    Probe(
        "a graph that is walked twice at ZeRO 3",
        (3,),
        _OFFLOAD,
        attributes="""applied_pre_backward_ref_cnt ds_grads_remaining pre_bwd_fn post_bwd_fn forward_hooks
            backward_hooks""",
    ),
    Probe(
        "second derivatives at ZeRO 3",
        (3,),
        f"{_OFFLOAD}.DeepSpeedZeRoOffload",
        methods="get_param_coordinator post_sub_module_backward_function",
    ),
    Probe(
        "gathers of ZeRO 3 in which all ranks take part",
        (3,),
        _COORDINATOR,
        methods="""reset_step fetch_sub_module release_sub_module is_record_trace is_complete_trace is_invalid_trace
            _invalidate_trace _clean_inflight_param_registry
            _PartitionedParameterCoordinator__all_gather_params _PartitionedParameterCoordinator__release_param
            _PartitionedParameterCoordinator__params_to_release""",
        attributes="""_PartitionedParameterCoordinator__submodule_order
            _PartitionedParameterCoordinator__allgather_stream
            _PartitionedParameterCoordinator__inflight_param_registry
            _PartitionedParameterCoordinator__n_available_params""",
    ),
    Probe(
        "small weights that stay gathered at ZeRO 3",
        (3,),
        f"{_OFFLOAD}.DeepSpeedZeRoOffload",
        methods="partition_all_parameters",
        calls=(("partition_all_parameters", "release_and_reset_all"),),
    ),
)

#: What newer releases have; the engine works around it on releases that lack it.
OPTIONAL = (
    Probe(
        "nested and failing backwards",
        (0, 1, 2, 3),
        _ENGINE,
        attributes="_running_engine_backward_count",
        without="the engine keeps track of them",
    ),
    Probe(
        "passes that do what they always did",
        (0, 1, 2, 3),
        _ENGINE,
        methods="_backward_prologue",
        attributes="_running_engine_backward_lock tput_timer training_dataloader zenflow",
        calls=(("forward", "register_output_backward_hooks"), ("_forward_prologue", "ensure_zero_ordered_dict")),
        all_names=(
            (
                "forward",
                f"""{_MARKS} ZeROOptimizer _backward_prologue _backward_prologue_per_tensor activation_mem_per_gpu
                    autocast_if_enabled autotuning_model_info autotuning_model_info_path autotuning_profile_model_info
                    clear_backward_seen_flag deepcompile_z3_forward_context exit get_ma_status global_steps hasattr
                    hook_handles is_compiled is_deepcompile_active is_deepcompile_enabled isinstance
                    launch_compile_passes log_dist_once module optimizer print_json_dist record_backward_start
                    record_forward_graph register_output_backward_hooks""",
            ),
            (
                "_forward_prologue",
                """_cast_inputs_half _in_forward _parameters _start_timers autotuning_profile_model_info engine_timers
                    ensure_zero_ordered_dict flops_profiler flops_profiler_enabled flops_profiler_profile_step
                    forward_timers fp16_auto_cast global_rank global_steps memory_breakdown module modules
                    random_ltd_enabled random_ltd_scheduler see_memory_usage start start_profile tput_timer training
                    training_dataloader update_seq zero_optimization_partition_weights""",
            ),
            (
                "_forward_epilogue",
                """ZeROOrderedDict _in_forward _parameters _stop_timers autotuning_profile_model_info engine_timers
                    flops_profiler flops_profiler_enabled flops_profiler_profile_step forward_timers global_rank
                    global_steps isinstance memory_breakdown module modules see_memory_usage stop_profile
                    zero_optimization_partition_weights""",
            ),
            (
                "backward",
                f"""{_MARKS} DummyOptim ZeROOptimizer _ENGINE_BACKWARD_GRAPH_TRACKER _backward_epilogue _compile_kwargs
                    _is_compiled_autograd_enabled _running_engine_backward _running_engine_backward_count
                    _running_engine_backward_lock _unmanaged_backward_count backward compiled_autograd
                    gradient_accumulation_steps isinstance managed_gradient_accumulation maybe_loss_for_backward
                    new_state optimizer register_current_graph register_hook remove requires_grad retain_graph scale
                    scale_if_loss torch_autocast_z0_gradscaler unregister""",
            ),
        ),
        without="upstream's own passes run, which are slower on the CPU",
    ),
    Probe(
        "the boundary of an accumulation",
        (1, 2, 3),
        "deepspeed.runtime.base_optimizer.ZeROOptimizer",
        methods="set_gradient_accumulation_boundary",
        without="an attribute is set instead",
    ),
    Probe(
        "one flat buffer for reduced gradients",
        (1, 2),
        _ZERO12,
        methods="""_use_compact_grad_partition_buffer _get_compact_grad_partition_buffer
            finalize_gradient_accumulation_boundary""",
        attributes="_offload_accumulated_param_ids",
        calls=(("finalize_gradient_accumulation_boundary", "_use_compact_grad_partition_buffer"),),
        without="the engine has buffers of its own",
    ),
    Probe(
        "reduction overlapped with backward at ZeRO 2",
        (2,),
        _ZERO12,
        attributes="_offload_gradient_safety_enabled",
        calls=(
            ("average_tensor", "ready_events"),
            ("average_tensor", "copy_streams"),
            ("reduce_independent_p_g_buckets_and_remove_grads", "reuse_events"),
            ("reduce_ipg_grads", "average_tensor"),
            ("reduce_ipg_grads", "reuse_events"),
        ),
        without="its buckets race on several streams: gradients are reduced at the end of each backward",
    ),
    Probe(
        "the gather of the weights after a step",
        (1, 2),
        _ZERO12,
        calls=(("step", "all_gather_dp_groups"), ("update_lp_params", "all_gather_dp_groups")),
        without="the weights are gathered by gloo's own, slower collective",
    ),
    Probe(
        "backwards that autograd says the end of",
        (1, 2, 3),
        _ZERO12,
        methods="should_refresh_expected_hook_count queue_post_backward_callback",
        without="upstream counts the parameters that each backward reaches",
    ),
    Probe(
        "one function for all gathers of ZeRO 3",
        (3,),
        "deepspeed.runtime.zero.partition_parameters.Init",
        calls=(("_convert_to_deepspeed_param", "_dist_allgather_fn"),),
        without="the weights are gathered by gloo's own, slower collective",
    ),
    Probe(
        "the average of a bucket at ZeRO 3",
        (3,),
        _ZERO3,
        methods="_get_param_partition_group",
        attributes="all2all_process_group postscale_gradients gradient_predivide_factor",
        calls=(("__reduce_and_partition_ipg_grads", "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"),),
        without="gradients are reduced by gloo's own, slower collective",
    ),
    Probe(
        "deferred offload at ZeRO 3",
        (3,),
        _ZERO3,
        methods="finalize_gradient_accumulation_boundary",
        attributes="_offload_boundary_param_ids",
        without="the engine copies the sums to the CPU in its step",
    ),
    Probe(
        "a step that an invalid norm leaves out at ZeRO 3",
        (3,),
        _ZERO3,
        calls=(("step", "is_invalid_grad_norm"),),
        without="upstream looks at fp16 gradients only, and the engine at fp32 gradients that have a loss scale",
    ),
    Probe(
        "every gather of several parameters awaited",
        (3,),
        "deepspeed.runtime.zero.partition_parameters.Init",
        loops=(("_allgather_params_coalesced", "launch_handles"),),
        without="on CPU, where the last gather may end before the others, parameters are gathered one by one",
    ),
)


@functools.cache  # looking takes nearly as long as the rest of making an engine
def check(stage: int, probes: tuple[Probe, ...] = REQUIRED) -> None:
    """Refuse a DeepSpeed on which gradients of this stage would be lost.

    Args:
        stage: The ZeRO stage.
        probes: What to check.

    Raises:
        UnsupportedDeepSpeedError: Naming the installed version, what is missing, and the feature that needs it.
    """
    for probe in probes:
        lost = probe.missing() if stage in probe.stages and probe.without is None else []
        if lost:
            raise unsupported(f"{', '.join(lost)}, which {probe.feature!r} relies on")


def unsupported(what: str) -> UnsupportedDeepSpeedError:
    """The error for a DeepSpeed without ``what``."""
    import deepspeed

    return UnsupportedDeepSpeedError(
        f"DeepSpeed {deepspeed.__version__} is not supported: it has no {what}. The engine would silently lose"
        " gradients. Install a release that lightning-zeroplus is tested with: `python -m lightning_zeroplus doctor`"
        " names them."
    )


@functools.cache
def has(feature: str) -> bool:
    """Whether this DeepSpeed has the :data:`OPTIONAL` feature of that name."""
    (probe,) = [probe for probe in OPTIONAL if probe.feature == feature]
    return not probe.missing()
