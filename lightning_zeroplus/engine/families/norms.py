"""Read averaged gradients for their norm and for the step without copying them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
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


def _all_chunk_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """:func:`chunk_norms` of each, in little of the host's time for the many that are smaller than a chunk."""
    small = [each for each in gradients if each.is_cpu and each.dtype == torch.float32 and each.numel() < _CHUNK]
    if len(small) < 2:
        return [chunk_norms(gradient) for gradient in gradients]
    # On the CPU it takes the same norm of each; those of an accelerator's kernel for many tensors may differ.
    quick = iter(torch.stack(torch._foreach_norm([each.detach() for each in small])).split(1))
    here = set(map(id, small))
    return [next(quick) if id(each) in here else chunk_norms(each) for each in gradients]


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


def global_norm(gradients: Iterable[Tensor], group: Any) -> Tensor:
    """The L2 norm of all ranks' gradients; the host waits for it, and so for all that comes before it, once.

    Upstream copies each gradient to fp64, which costs more than the whole update, reduces the norm of each group by
    itself, and reads it back several times.

    Args:
        gradients: This rank's.
        group: The ranks.

    Returns:
        A scalar in fp32, on the CPU; infinite if a gradient is not finite.
    """
    norms = _all_chunk_norms(list(gradients))
    device = get_accelerator().current_device_name()
    square = torch.cat(norms).double().square().sum().float() if norms else torch.zeros((), device=device)
    dist.all_reduce(square, group=group)
    norm = square.sqrt().cpu()
    return norm if norm.isfinite() else torch.full_like(norm, torch.inf)


class ReadsGradientsOnce:
    """Overrides on upstream's optimizers of stages 1 to 3."""

    def scaled_global_norm(self: Any, norm_type: int = 2) -> Tensor:
        """The norm of the averaged gradients of stages 1 and 2, as they are scaled; see :func:`global_norm`."""
        if self.cpu_offload or self.has_moe_layers or getattr(self, "use_muon", False) or norm_type != 2:
            return super().scaled_global_norm(norm_type)  # type: ignore[misc]
        # Upstream marks padding, and skips it.
        gradients = chain.from_iterable(self.averaged_gradients[index] for index in range(len(self.bit16_groups)))
        return global_norm((g for g in gradients if not getattr(g, "_zero_padding", False)), self.dp_process_group)

    def _get_norm_groups(self: Any) -> list[Tensor]:
        """The same for stage 3: upstream combines the norms of groups, and gets one."""
        if self.offload_optimizer or getattr(self, "use_muon", False):
            return super()._get_norm_groups()  # type: ignore[misc]
        gradients = chain.from_iterable(self.averaged_gradients[index] for index in range(len(self.fp16_groups)))
        return [global_norm(gradients, self.dp_process_group)]

    def unscale_and_clip_grads(self: Any, gradients: Any, total_norm: Tensor) -> None:
        """Skip upstream's pass over the gradients if there is nothing to unscale or clip: it would multiply by 1."""
        if self.loss_scale != 1 or self.clip_grad > 0:
            super().unscale_and_clip_grads(gradients, total_norm)  # type: ignore[misc]
