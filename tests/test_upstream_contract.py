"""The names of upstream that the engine overrides or reads. A failure here says which override has lost its ground."""

from __future__ import annotations

import inspect
import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

METHODS = {
    DeepSpeedEngine: """is_gradient_accumulation_boundary _backward_epilogue backward step destroy load_checkpoint
        buffered_allreduce_fallback fp16_enabled get_global_grad_norm no_sync zero_reduce_bucket_size""",
    ZeROOptimizer: "set_gradient_accumulation_boundary",
    DeepSpeedZeroOptimizer: """
        independent_gradient_partition_epilogue async_accumulate_grad_in_cpu_via_gpu unscale_and_clip_grads
        finalize_gradient_accumulation_boundary process_gradients copy_grads_in_partition
        clear_grad_attribute get_param_comm_dtype _use_compact_grad_partition_buffer
        _get_compact_grad_partition_buffer _release_ipg_buffers reset_cpu_buffers get_param_id zero_grad""",
    DeepSpeedZeroOptimizer_Stage3: """
        partition_grads reduce_ready_partitions_and_remove_grads get_param_comm_dtype unscale_and_clip_grads
        independent_gradient_partition_epilogue finalize_gradient_accumulation_boundary
        _swappable_optimizer_subgroup reset_cpu_buffers get_param_id zero_grad""",
    BF16_Optimizer: "clear_lp_grads zero_grad",
    FP16_UnfusedOptimizer: "unscale_and_clip_grads zero_grad",
}
ATTRIBUTES = {
    DeepSpeedEngine: """_running_engine_backward _support_torch_style_backward _global_grad_norm
        basic_optimizer module_forward_pre_hook module_forward_post_hook""",
    DeepSpeedZeroOptimizer: """
        ready_for_gradients micro_step_id _offload_accumulated_param_ids partition_gradients cpu_offload
        round_robin_bit16_groups params_in_partition partition_size grad_start_offset
        grad_partition_insertion_offset param_to_partition_ids dp_process_group reduce_scatter
        reduce_bucket_size grad_position single_partition_of_fp32_groups use_grad_accum_attribute
        gradient_accumulation_dtype all_grad_tensors averaged_gradients ipg_buckets
        extra_large_param_to_reduce previous_reduced_grads params_already_reduced clip_grad""",
    DeepSpeedZeroOptimizer_Stage3: """
        leaf_parameters dp_process_group reduce_scatter reduce_bucket_size micro_step_id averaged_gradients
        fp16_groups offload_optimizer grad_position fp32_partitioned_groups_flat _offload_boundary_param_ids
        ipg_buckets clip_grad""",
    BF16_Optimizer: "fp32_groups_gradients_flat clip_grad",
    FP16_UnfusedOptimizer: "clip_grad loss_scale",
}


def _pairs(table: dict[type, str]) -> list[tuple[type, str]]:
    return [(cls, name) for cls, names in table.items() for name in names.split()]


@pytest.mark.parametrize(("cls", "name"), _pairs(METHODS))
def test_method_exists(cls: type, name: str) -> None:
    assert callable(getattr(cls, name, None)), f"{cls.__name__}.{name}"


@pytest.mark.parametrize(("cls", "name"), _pairs(ATTRIBUTES))
def test_attribute_is_still_used(cls: type, name: str) -> None:
    """Instance attributes are looked for in the source: to build each optimizer here would take ranks."""
    source = inspect.getsource(cls)
    assert f"self.{name} =" in source or f"self.{name}:" in source or hasattr(cls, name), f"{cls.__name__}.{name}"


def test_stage3_module_counters_are_still_used() -> None:
    source = inspect.getsource(parameter_offload)
    assert "module.applied_pre_backward_ref_cnt += 1" in source
    assert "module.ds_grads_remaining += 1" in source


def test_no_optimizer_scales_the_loss_at_stage_0() -> None:
    """If upstream begins to scale for the stage-0 fp16 optimizer, ``ZeroPlusEngine.backward`` must stop."""
    assert not issubclass(FP16_UnfusedOptimizer, ZeROOptimizer)
