"""Read averaged gradients for their norm and for the step without copying them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: Number of elements whose squares are summed in fp32: few enough for the sum to stay accurate.
_CHUNK = 4096


def chunk_norms(gradient: Tensor) -> Tensor:
    """The L2 norms of chunks of a gradient; the norm of these norms is the norm of the gradient.

    Args:
        gradient: A real tensor of any shape and dtype.

    Returns:
        A vector in fp32; in fp64 for a gradient in fp64.
    """
    flat = gradient.detach().reshape(-1)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    whole = flat.numel() - flat.numel() % _CHUNK
    rest = torch.linalg.vector_norm(flat[whole:]).view(1)
    if not whole:
        return rest
    return torch.cat([torch.linalg.vector_norm(flat[:whole].view(-1, _CHUNK), dim=1), rest])


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Join flat tensors without a copy.

    Args:
        tensors: One-dimensional and contiguous.

    Returns:
        A view of their memory; None if they do not lie one after the other in one memory.
    """
    first, end = tensors[0], tensors[0].storage_offset()
    for each in tensors:
        alike = each.dtype == first.dtype and each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not alike or each.dim() != 1 or each.storage_offset() != end:
            return None
        end += each.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


class ReadsGradientsOnce:
    """Overrides on upstream's optimizers of stages 1 to 3; each calls ``super()``."""

    def get_grad_norm_direct(self: Any, gradients: Any, params: Any, norm_type: float = 2) -> Any:
        """Take upstream's norm of chunk norms: it copies its input to fp64, which costs more than the whole update."""
        if norm_type == 2:
            # Upstream marks padding, and skips it.
            gradients = [each if getattr(each, "_zero_padding", False) else chunk_norms(each) for each in gradients]
        return super().get_grad_norm_direct(gradients, params, norm_type)  # type: ignore[misc]

    def unscale_and_clip_grads(self: Any, gradients: Any, total_norm: Tensor) -> None:
        """Skip upstream's pass over the gradients if there is nothing to unscale or clip: it would multiply by 1."""
        if self.loss_scale != 1 or self.clip_grad > 0:
            super().unscale_and_clip_grads(gradients, total_norm)  # type: ignore[misc]
