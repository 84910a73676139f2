"""The consumed gradients: where this rank's innermost ``torch.optim.Optimizer`` finds each parameter's gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_WRAPPED = "_checkpoint_wrapped_module."


class Share(NamedTuple):
    """Consecutive elements of a parameter that this rank's optimizer updates.

    The optimizer consumes ``numel`` elements of ``held.grad``, flattened, from ``offset`` on; of a DTensor, the local
    part.

    Attributes:
        held: The tensor in the optimizer's ``param_groups``: the parameter, its master weight, or a flat partition.
        offset: Index of the first element in the flattened ``held`` or its local part.
        start: Index of the first element in the flattened parameter.
        numel: Number of elements.
    """

    held: Tensor
    offset: int
    start: int
    numel: int

    def gradient(self) -> Tensor | None:
        """The current gradient of the share, one-dimensional; None if there is none."""
        grad = self.held.grad
        if grad is None:
            return None
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        return local.reshape(-1).narrow(0, self.offset, self.numel)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters, named as in a state dict: without the wrappers for activation checkpointing."""
    for name, param in module.named_parameters():
        yield name.replace(_WRAPPED, ""), param


def full_shape(param: nn.Parameter) -> tuple[int, ...]:
    """The shape of the whole parameter, also while ZeRO-3 has it partitioned and thus empty."""
    return tuple(getattr(param, "ds_shape", param.shape))


def optimizer_shares(optimizers: Iterable[Optimizer]) -> dict[int, Share]:
    """Shares, by the parameter's ``id``, of optimizers that hold the parameters, whole or sharded by FSDP2."""
    held = (param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"])
    return {id(param): _local_share(param) for param in held}


def first_row(rows: int, ranks: int, rank: int) -> int:
    """The first row of a rank's part. Parts are as in ``torch.chunk()``: equal, but the last ones may be smaller."""
    return min(math.ceil(rows / ranks) * rank, rows)


@torch.no_grad()
def _local_share(param: Tensor) -> Share:
    if not isinstance(param, DTensor):
        return Share(param, 0, 0, param.numel())
    first = 0
    for dim, placement in enumerate(param.placements):  # at most one is a Shard, along dimension 0
        if placement.is_shard():
            first = first_row(param.shape[0], param.device_mesh.size(dim), param.device_mesh.get_local_rank(dim))
    return Share(param, 0, first * math.prod(param.shape[1:]), param.to_local().numel())


def engine_optimizers(engine: DeepSpeedEngine) -> list[Optimizer]:
    """The torch optimizers below DeepSpeed's optimizer; they step on reduced, unscaled and clipped gradients."""
    found = [engine.basic_optimizer, getattr(engine.optimizer, "backup_optimizer", None)]
    return [optimizer for optimizer in found if isinstance(optimizer, Optimizer)]


def engine_shares(engine: DeepSpeedEngine, params: Iterable[nn.Parameter]) -> dict[int, Share]:
    """Shares of a DeepSpeed engine of any stage, by the parameter's ``id``.

    Relies on upstream's links from a parameter to its fp32 weights, which upstream's checkpoints use too:
    ``_hp_mapping`` (stages 1 and 2, ``BF16_Optimizer``), ``grad_position``, the place of a partition in
    ``fp32_partitioned_groups_flat`` (stage 3), and the lists of groups (stage 0 in low precision). Relies on none of
    upstream's gradient buffers.
    """
    optimizer: Any = engine.optimizer
    if optimizer is engine.basic_optimizer:
        return optimizer_shares([optimizer])
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return {id(param): _stage3_share(optimizer, param) for param in params if param.requires_grad}
    if hasattr(optimizer, "fp32_groups") or hasattr(optimizer, "fp32_groups_flat"):
        return dict(_master_shares(optimizer))
    shares = {}
    for param in params:
        mapping = getattr(param, "_hp_mapping", None)  # None: the whole parameter belongs to other ranks
        if mapping is not None:
            (held,) = engine.basic_optimizer.param_groups[mapping.param_group_index]["params"]
            place = mapping.hp_fragment_address
            shares[id(param)] = Share(held, place.start, mapping.lp_fragment_address.start, place.numel)
    return shares


def _stage3_share(optimizer: Any, param: Any) -> Share:
    group, offset, _ = optimizer.grad_position[optimizer.get_param_id(param)]
    part = param.partition_numel()
    start = min(part * dist.get_rank(group=param.ds_process_group), param.ds_numel)
    numel = min(part, param.ds_numel - start)  # the last partition may be padded
    return Share(optimizer.fp32_partitioned_groups_flat[group], int(offset), start, numel)


def _master_shares(optimizer: Any) -> Iterator[tuple[int, Share]]:
    flat = getattr(optimizer, "fp32_groups_flat", None)
    for index, params in enumerate(optimizer.fp16_groups):
        offset = 0
        for position, param in enumerate(params):
            held = optimizer.fp32_groups[index][position] if flat is None else flat[index]
            yield id(param), Share(held, offset, 0, param.numel())
            offset += 0 if flat is None else param.numel()
