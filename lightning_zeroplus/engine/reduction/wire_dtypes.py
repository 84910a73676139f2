"""The dtypes of an engine's gradients: the dtype in which a rank sums them, and the dtype of the reduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.torch_autocast import is_autocast_initialized
from torch import nn

from lightning_zeroplus.engine.reduction.local_sums import LocalSums
from lightning_zeroplus.gradients.dtype import (
    GRAD_DTYPES,
    expect_grad_dtype,
    expected_grad_dtype,
    user_set_grad_dtype,
)

if TYPE_CHECKING:
    from lightning_zeroplus.engine.host import EngineHost


def ask_for_dtypes(
    module: nn.Module, grad_dtypes: Mapping[str, torch.dtype | None], sum_dtype: torch.dtype | None
) -> None:
    """Let autograd sum the gradients of a module's parameters in the dtypes that they should have.

    Args:
        module: The module; frozen parameters are left alone.
        grad_dtypes: The dtypes by name of the parameter; None: the dtype of the incoming gradient.
        sum_dtype: The dtype for all others, unless the user has set ``param.grad_dtype``; None: the parameter's own.
    """
    for name, param in module.named_parameters():
        if param.requires_grad and name in grad_dtypes:
            expect_grad_dtype(param, grad_dtypes[name])
        elif param.requires_grad and not user_set_grad_dtype(param):
            expect_grad_dtype(param, sum_dtype or param.dtype)


def sum_dtype_of(param: nn.Parameter) -> torch.dtype:
    """The dtype in which a parameter's gradient is summed; the parameter's dtype if any dtype may come."""
    return expected_grad_dtype(param) or param.dtype


def grad_bytes(param: nn.Parameter) -> int:
    """The size of a parameter's whole gradient in bytes; 0 if the parameter is frozen."""
    if not param.requires_grad:
        return 0
    return whole_numel(param) * sum_dtype_of(param).itemsize


def whole_numel(param: nn.Parameter) -> int:
    """The elements of a parameter, which is empty itself while it is partitioned."""
    return int(getattr(param, "ds_numel", param.numel()))


class WireDtypes:
    """The dtypes in which gradients are reduced: their own, unless the config names one for all.

    Args:
        engine: The engine.
        optimizer: The engine's optimizer.
        params: The parameters.
        local_sums: The gradients that wait on this rank.
    """

    def __init__(
        self, engine: EngineHost, optimizer: Any, params: Sequence[nn.Parameter], local_sums: LocalSums
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._params = params
        self._local_sums = local_sums

    def own(self, index: int) -> torch.dtype | None:
        """The dtype in which to reduce a gradient that this rank has; None: the dtype in the config."""
        if self._engine.has_configured_wire_dtype or is_autocast_initialized():
            return None
        dtype = expected_grad_dtype(self._params[index])
        if dtype is not None:
            return dtype
        grad = self._local_sums.sums.get(index, self._params[index].grad)
        assert grad is not None, "a parameter without a gradient is in no bucket"
        return grad.dtype

    def agreed(self, members: frozenset[int]) -> dict[int, torch.dtype]:
        """The dtype in which to reduce each waiting gradient; equal on all ranks, even if some have no gradient."""
        come_as_they_are = [
            index
            for index in sorted(members)
            if expected_grad_dtype(self._params[index]) is None and not self._engine.has_configured_wire_dtype
        ]
        dtypes = {}
        if come_as_they_are:
            found = [self._local_sums.sums.get(index) for index in come_as_they_are]
            codes = [-1 if grad is None else GRAD_DTYPES.index(grad.dtype) for grad in found]
            highest = torch.tensor(codes, device=self._engine.device)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            dtypes = {index: GRAD_DTYPES[code] for index, code in zip(come_as_they_are, highest.tolist(), strict=True)}
        others = members.difference(come_as_they_are)
        return dtypes | {index: self._optimizer.get_param_comm_dtype(self._params[index]) for index in others}
