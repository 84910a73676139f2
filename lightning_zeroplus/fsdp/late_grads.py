"""FSDP2's own records of a unit's parameters, and the dtype in which a gradient is summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard


def grad_dtype(param: Tensor) -> torch.dtype:
    """The dtype in which the parameter's gradient is summed."""
    return param.grad_dtype or param.dtype


def groups(unit: FSDPModule) -> list[Any]:
    """FSDP2's groups of the unit's parameters; each group is gathered by itself."""
    state: Any = fully_shard.state(unit)  # type: ignore[attr-defined]
    return list(state._fsdp_param_groups)


def parameters(unit: FSDPModule) -> list[Any]:
    """FSDP2's own records of the unit's parameters."""
    return [param for group in groups(unit) for param in group.fsdp_params]
