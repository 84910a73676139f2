"""What ``gradients`` and ``fsdp`` rely on inside torch, checked before anything is trained.

Most of it is not public. A method that torch no longer calls, or a value that it no longer keeps, would show as a
wrong gradient only. It is listed here with the feature that needs it; a torch without it is refused.
"""

from __future__ import annotations

import functools

from lightning_zeroplus.internals.probe import Probe

_STAGES = (0, 1, 2, 3)
_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_GROUP = f"{_FULLY_SHARD}._fsdp_param_group.FSDPParamGroup"
_PARAM = f"{_FULLY_SHARD}._fsdp_param.FSDPParam"
_STATE = f"{_FULLY_SHARD}._fsdp_state.FSDPState"


def _of(owner: str, feature: str, methods: str = "", attributes: str = "", *calls: tuple[str, str]) -> Probe:
    return Probe(feature, _STAGES, owner, methods=methods, attributes=attributes, calls=calls)


#: What ``gradients`` needs, under every strategy.
GRADIENTS = (
    _of("torch.Tensor", "the dtype of a gradient", attributes="grad_dtype"),
    _of(
        "torch._C",
        "which backward runs",
        "_will_engine_execute_node _current_autograd_node _current_graph_task_id DisableTorchFunctionSubclass",
    ),
    _of("torch._C", "tensors that follow a weight", "_storage_Use_Count"),
    _of("torch._C._functorch", "weights within torch.func", "peek_interpreter_stack is_functorch_wrapped_tensor"),
    _of("torch._functorch.pyfunctorch", "weights within torch.func", "temporarily_clear_interpreter_stack"),
    _of("torch._functorch.vmap", "whole weights within vmap", "", "", ("_create_batched_inputs", "_add_batch_dim")),
    _of(
        "torch._functorch.eager_transforms",
        "whole weights within torch.func",
        "",
        "",
        ("_wrap_all_tensors", "_wrap_tensor_for_grad"),
    ),
    _of(
        "torch.distributed.distributed_c10d",
        "collectives that the user's code calls",
        "",
        "",
        *((name, "_rank_not_in_group") for name in ("all_reduce", "broadcast", "all_gather", "barrier")),
        *((name, "_check_single_tensor") for name in ("all_reduce", "broadcast")),
    ),
    _of("torch.autograd.forward_ad", "forward-mode derivatives", attributes="_current_level"),
)

#: What ``fsdp`` needs in addition.
FSDP = (
    _of("torch._C", "tensors of weights that users keep after a fit", "_EnableTorchFunction"),
    _of(
        _GROUP,
        "watching what FSDP2 gathers and reduces",
        """unshard wait_for_unshard reshard pre_forward post_forward post_backward _to_sharded _to_unsharded
        _init_mp_dtypes _register_post_backward_hook _wait_for_post_backward""",
        """fsdp_params _training_state _sharded_state _all_gather_result reduce_grads all_reduce_grads
        reshard_after_backward _reshard_after_forward _partial_reduce_output mesh_info comm_ctx device_handle
        _use_post_forward_mesh _all_gather_comm _reduce_scatter_comm _module_to_pre_save_state_dict_hook_handle
        _module_to_pre_load_state_dict_hook_handle is_unsharded is_sharded
        _wait_all_gather_streams_on_event|wait_all_gather_streams_on_event
        _orig_dtype|_set_unsharded_grad_dtypes""",
        ("pre_forward", "unshard"),
        ("pre_forward", "wait_for_unshard"),
        ("pre_forward", "_register_post_backward_hook"),
        ("wait_for_unshard", "_to_unsharded"),
        ("post_forward", "reshard"),
        ("reshard", "_to_sharded"),
        ("lazy_init", "_init_mp_dtypes"),
        ("post_backward", "reduce_grads"),
        ("post_backward", "all_reduce_grads"),
        ("post_backward", "_partial_reduce_output"),
        ("unshard", "_all_gather_comm"),
        ("post_backward", "_reduce_scatter_comm"),
    ),
    _of(
        _PARAM,
        "parameters that look whole",
        "_get_grad_inner_tensor reset_sharded_param to_sharded_dtensor _setattr_on_modules free_unsharded_param",
        """_unsharded_param sharded_param unsharded_accumulated_grad sharded_state _sharded_param_data _sharding_spec
        _spmd_mesh _orig_size sharded_size _contiguous_orig_stride contiguous_sharded_stride padded_sharded_param_size
        grad_offload_event _module_info orig_dtype param_dtype reduce_dtype _post_load_hook_handle shard_mesh
        pin_memory""",
        ("unsharded_grad_data", "_get_grad_inner_tensor"),
    ),
    _of(
        f"{_FULLY_SHARD}._fsdp_param.ParamModuleInfo",
        "parameters that several modules share",
        attributes="module param_name shared_modules shared_param_names",
    ),
    _of(f"{_FULLY_SHARD}._fsdp_param.ShardedState", "gathers of other ranks", attributes="SHARDED"),
    _of(
        _STATE,
        "the end of a backward",
        "_lazy_init _root_post_backward_final_callback _register_root_post_backward_final_callback",
        """_fsdp_param_groups _modules _is_root _state_ctx _mp_policy _pre_forward_hook_handle
        _post_forward_hook_handle post_backward_final_callback_queued iter_forward_root""",
        ("_pre_backward", "_register_root_post_backward_final_callback"),
        ("_register_root_post_backward_final_callback", "_root_post_backward_final_callback"),
        ("_root_post_backward_final_callback", "post_backward"),
    ),
    _of(
        _STATE,
        "tensors in objects that a module returns",
        "_pre_backward",
        "",
        ("_pre_forward", "_root_pre_forward"),
        ("_post_forward", "_register_pre_backward_hook"),
    ),
    _of(
        "torch.distributed.fsdp.FSDPModule",
        "holding gradients back",
        "set_requires_gradient_sync set_requires_all_reduce reshard unshard",
        "_orig_cls_mro_index",
    ),
    _of(
        f"{_FULLY_SHARD}._fully_shard",
        "units of abstract classes",
        "get_cls_to_fsdp_cls _unimplemented_deepcopy",
        "",
    ),
    _of("torch.nn.Module", "parameters that stay the same objects", "_named_members"),
    _of("torch._dynamo.config", "weights in compiled functions", attributes="nontraceable_tensor_subclasses"),
    _of("torch._ops.OpOverload", "operators that write weights", "name"),
    _of("torch._ops.OpOverloadPacket", "operators that write weights", "overloads"),
    _of(f"{_FULLY_SHARD}._fsdp_collectives.DefaultAllGather", "gathers on gloo", "__call__"),
    _of(f"{_FULLY_SHARD}._fsdp_collectives.DefaultReduceScatter", "reductions on gloo", "__call__"),
    _of(f"{_FULLY_SHARD}._fsdp_common.HSDPMeshInfo", "replicas"),
    _of(f"{_FULLY_SHARD}._fsdp_common.TrainingState", "where a unit is in a pass", "", "IDLE POST_BACKWARD"),
    _of("torch.distributed.tensor.DTensor", "parameters that look whole", "", "_local_tensor _spec _op_dispatcher"),
    _of(
        "torch.distributed.tensor._dispatch.OpDispatcher",
        "values that are written to shards",
        attributes="_allow_implicit_replication",
    ),
    _of("torch.autograd.function._SingleLevelFunction", "whole weights for a Function", "apply"),
    _of("torch.autograd.function.Function", "whole weights for a Function", "apply"),
    _of("torch.distributed._composable.contract", "unsharding at the end", attributes="REGISTRY_KEY STATE_KEY"),
    _of("torch.distributed._composable_state", "unsharding at the end", attributes="_module_state_mapping"),
    _of("torch.optim.optimizer", "optimizers that step shards", attributes="_foreach_supported_types"),
    _of("torch.utils._foreach_utils", "optimizers that step shards", attributes="_foreach_supported_types"),
)


class UnsupportedTorchError(RuntimeError):
    """The installed torch lacks something that this package relies on."""


@functools.cache
def check_torch(probes: tuple[Probe, ...]) -> None:
    """Refuse a torch on which gradients would be wrong.

    Args:
        probes: :data:`GRADIENTS`, or :data:`FSDP`.

    Raises:
        UnsupportedTorchError: Naming the installed version, what is missing, and the feature that needs it.
    """
    for probe in probes:
        _refuse(probe, probe.missing())


@functools.cache
def check_imports(probes: tuple[Probe, ...]) -> None:
    """Refuse a torch that lacks one of the classes or modules themselves, before they are imported.

    Raises:
        UnsupportedTorchError: As :func:`check_torch`.
    """
    for probe in probes:
        _refuse(probe, probe._replace(methods="", attributes="", calls=()).missing())


def _refuse(probe: Probe, lost: list[str]) -> None:
    if lost:
        import torch

        raise UnsupportedTorchError(
            f"torch {torch.__version__} is not supported: it has no {', '.join(lost)}, which {probe.feature!r} relies"
            " on. Gradients would silently be wrong. Install a release that lightning-zeroplus is tested with:"
            " `python -m lightning_zeroplus doctor` names them."
        )
