"""The dtype in which FSDP2 sums a unit's unsharded gradients, with a fallback for torch without ``grad_dtype``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard


def has_grad_dtype() -> bool:
    """Whether autograd can accumulate in another dtype than the leaf's."""
    return hasattr(torch.Tensor, "grad_dtype")


def grad_dtype(param: Tensor) -> torch.dtype:
    """The dtype in which the parameter's gradient is summed."""
    return (param.grad_dtype if has_grad_dtype() else None) or param.dtype


def cast_late_grads(unit: FSDPModule) -> None:
    """Move gradients in the parameters' dtype to FSDP2's accumulators, which have the reduce dtype.

    FSDP2 does so at the end of a backward that does not reduce, but not for gradients that arrive later. If only some
    gradients of a unit were moved, its reduce-scatter fails ("expects uniform gradient dtype"). The order of the calls
    matters: first add to existing accumulators, then make missing ones. ``to_accumulated_grad_if_needed`` alone, or
    first, would replace an accumulator and lose what it held.
    """
    for param in parameters(unit):
        if hasattr(param, "_unsharded_param"):
            param.accumulate_unsharded_grad_if_needed()
            param.to_accumulated_grad_if_needed()


def groups(unit: FSDPModule) -> list[Any]:
    """FSDP2's groups of the unit's parameters; each group is gathered by itself."""
    state: Any = fully_shard.state(unit)  # type: ignore[attr-defined]
    found: list[Any] | None = getattr(state, "_fsdp_param_groups", None)  # one group per unit before torch 2.12
    if found is None:
        found = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return found


def parameters(unit: FSDPModule) -> list[Any]:
    """FSDP2's own records of the unit's parameters."""
    return [param for group in groups(unit) for param in group.fsdp_params]
