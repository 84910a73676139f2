"""DeferredGroupedLinear: one linear layer per expert, with deferred weight gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_zeroplus.weight_grads.linear import anchor, autocast_dtype, can_defer
from lightning_zeroplus.weight_grads.store import WeightGradStore


class DeferredGroupedLinear(nn.Module):
    """The linear layers of all experts of a mixture, as one weight and one bias.

    ========  =============================  =================================================
    Forward   ``y[e] = x[e] W[e]^T + b[e]``  ``[N, in] [E, out, in] [E, out] -> [N, out]``
    Dgrad     ``dx[e] = dy[e] W[e]``         ``[N, out] [E, out, in] -> [N, in]``
    Wgrad     ``dW[e] = dy[e]^T x[e]``       ``[N, out] [N, in] -> [E, out, in]``, later
    ========  =============================  =================================================

    ``x[e]`` are the ``counts[e]`` rows of expert ``e``: the rows of ``x`` are sorted by expert. As in gpt-oss, the bias
    is in the same module, and thus FSDP2 group, as the weight; its gradient is not deferred. An expert without rows has
    a zero gradient. The products run one expert after the other. Otherwise as
    :class:`~lightning_zeroplus.DeferredLinear`.

    Args:
        experts: Number of experts, E.
        in_features: Size of a row of the input.
        out_features: Size of a row of the output.
        bias: Whether there is a bias.
        device: Of weight and bias.
        dtype: Of weight and bias.
        store: Where weight gradients wait; None as in :class:`~lightning_zeroplus.DeferredLinear`.
    """

    store: WeightGradStore | None = None

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        store: WeightGradStore | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(experts, out_features, device=device, dtype=dtype)) if bias else None
        self.store = store
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each expert as ``nn.Linear`` is."""
        bound = 1 / math.sqrt(self.weight.shape[2])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor, counts: Tensor) -> Tensor:
        """Apply each expert to its rows.

        Args:
            input: ``[N, in]``, sorted by expert.
            counts: ``[E]``, integers: the number of rows of each expert. Their sum is N. Counts on a GPU let the host
                wait for it, in each call: if several layers share them, move them once, ``counts.cpu()``.

        Returns:
            ``[N, out]``.

        Raises:
            ValueError: If ``counts`` does not fit ``input`` and the weight.
        """
        return _grouped_linear(input, counts, self)

    def extra_repr(self) -> str:
        experts, out_features, in_features = self.weight.shape
        return f"{experts=}, {in_features=}, {out_features=}, bias={self.bias is not None}"


@torch.compiler.disable
def _grouped_linear(x: Tensor, counts: Tensor, owner: DeferredGroupedLinear) -> Tensor:
    sizes: list[int] = counts.tolist()
    if len(sizes) != owner.weight.shape[0] or sum(sizes) != x.shape[0] or min(sizes, default=0) < 0:
        raise ValueError(
            f"`counts={sizes}` must have one entry for each of {owner.weight.shape[0]} experts and add up to the"
            f" {x.shape[0]} rows of `input`."
        )
    dtype = autocast_dtype(x)
    bias: Tensor | None = owner.bias
    if dtype != x.dtype:
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    low: Tensor = owner.weight
    defer = can_defer(owner.store, owner.weight)
    if torch.is_autocast_enabled(x.device.type):
        low = (low.detach() if defer else low).to(dtype)
    if defer:
        return _Grouped.apply(x, bias, anchor(x, bias), (low, owner.weight), sizes, owner)
    return _forward(x, low, bias, sizes)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int]) -> Tensor:
    biases: Any = [None] * len(sizes) if bias is None else bias
    return torch.cat([F.linear(*each) for each in zip(x.split(sizes), weight, biases, strict=True)])


class _Grouped(torch.autograd.Function):
    # As in _Linear: autograd does not see the weight, and the leaf is not among the saved tensors.
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        anchor: Tensor | None,
        weights: tuple[Tensor, Tensor],
        sizes: list[int],
        owner: DeferredGroupedLinear,
    ) -> Tensor:
        low, leaf = weights
        ctx.save_for_backward(x, low)
        ctx.leaf = leaf
        ctx.sizes = sizes
        ctx.owner = owner
        return _forward(x, low, bias, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        sizes = ctx.sizes
        groups = dy.split(sizes)
        dx = torch.cat([g @ w for g, w in zip(groups, low, strict=True)]) if ctx.needs_input_grad[0] else None
        db = torch.stack([g.sum(0) for g in groups]) if ctx.needs_input_grad[1] else None

        def weight_grad(dy: Tensor, x: Tensor) -> Tensor:
            pairs = zip(dy.split(sizes), x.split(sizes), strict=True)
            return torch.stack([g.t() @ rows for g, rows in pairs])

        ctx.owner.store.put(ctx.leaf, weight_grad, dy, x, owner=ctx.owner)
        return dx, db, None, None, None, None
