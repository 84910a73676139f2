"""DeferredLinear: a linear layer with a deferred weight gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from lightning_zeroplus.weight_grads.store import WeightGradStore


class DeferredLinear(nn.Linear):
    """``nn.Linear`` whose backward leaves the weight's gradient in a store.

    ========  ======================  =====================================
    Forward   ``y = x W^T + b``       ``[..., in] [out, in] -> [..., out]``
    Dgrad     ``dx = dy W``           ``[..., out] [out, in] -> [..., in]``
    Wgrad     ``dW = dy^T x``         ``[N, out] [N, in] -> [out, in]``, later
    ========  ======================  =====================================

    ``N`` is the product of the leading dimensions. The gradient of the bias is not deferred. ``nn.Linear`` under
    autograd does the same operations in the same order, so the numbers are equal bit for bit. There is no second
    derivative, and ``torch.compile`` breaks its graph here. The layer is an ordinary ``nn.Linear`` without a store,
    outside of :meth:`~lightning_zeroplus.WeightGradStore.defer`, and if its weight is frozen, parametrized or
    tensor-parallel.

    Args:
        in_features: As in ``nn.Linear``.
        out_features: As in ``nn.Linear``.
        bias: As in ``nn.Linear``.
        device: As in ``nn.Linear``.
        dtype: As in ``nn.Linear``.
        store: Where weight gradients wait. None: the one that :class:`~lightning_zeroplus.ZeroPlusFSDPStrategy` gives,
            if it trains the module.
    """

    store: WeightGradStore | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        store: WeightGradStore | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.store = store

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]``."""
        if not can_defer(self.store, self.weight):
            return super().forward(input)
        return _deferred_linear(input, self.bias, self)


def can_defer(store: WeightGradStore | None, weight: Tensor) -> bool:
    """Whether ``store`` takes gradients now, and ``weight`` is a plain leaf that requires one."""
    return (
        store is not None
        and store.deferring
        and torch.is_grad_enabled()
        and weight.requires_grad
        and weight.is_leaf
        and not isinstance(weight, DTensor)
    )


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with ``x`` under the current autocast."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def anchor(*inputs: Tensor | None) -> Tensor | None:
    """A dummy leaf if no input requires a gradient, so that there is a backward; else None."""
    if any(tensor is not None and tensor.requires_grad for tensor in inputs):
        return None
    return torch.empty(0, requires_grad=True)


@torch.compiler.disable
def _deferred_linear(x: Tensor, bias: Tensor | None, owner: DeferredLinear) -> Tensor:
    # The casts of autocast. Autograd sees the casts of x and bias; a flush casts the weight's gradient back.
    dtype = autocast_dtype(x)
    if dtype != x.dtype:
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    low = owner.weight.detach().to(dtype) if torch.is_autocast_enabled(x.device.type) else owner.weight
    return _Linear.apply(x, bias, anchor(x, bias), (low, owner.weight), owner)


def weight_grad(dy: Tensor, x: Tensor) -> Tensor:
    """``dy^T x``: ``[..., out], [..., in] -> [out, in]``."""
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


class _Linear(torch.autograd.Function):
    # The weight comes in a tuple, where autograd does not see it. Autograd calls the tensor hooks of an input without a
    # gradient with None, which the hooks of a ZeRO engine would take for a gradient.
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        anchor: Tensor | None,
        weights: tuple[Tensor, Tensor],
        owner: DeferredLinear,
    ) -> Tensor:
        low, leaf = weights
        ctx.save_for_backward(x, low)
        # Not through saved_tensors: non-reentrant checkpointing returns detached copies, and the leaf itself would get
        # no gradient.
        ctx.leaf = leaf
        ctx.owner = owner
        return F.linear(x, low, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        flat = dy.reshape(-1, dy.shape[-1])
        dx = (flat @ low).view(x.shape) if ctx.needs_input_grad[0] else None
        db = flat.sum(0) if ctx.needs_input_grad[1] else None
        ctx.owner.store.put(ctx.leaf, weight_grad, dy, x, owner=ctx.owner)
        return dx, db, None, None, None
