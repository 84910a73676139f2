"""Read averaged gradients for their norm and for the step without copying them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from lightning_zeroplus.engine.upstream.reports import SparesReports

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
    """:func:`chunk_norms` of each, in little of the host's time for the many that are smaller than a chunk.

    Kernels of an accelerator sum a tensor in parts anyway. There each norm is that of a whole gradient, by a kernel
    for many tensors, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    if gradients and not any(each.is_cpu for each in gradients):
        dtype = reduce(torch.promote_types, (each.dtype for each in gradients), torch.float32)
        norms: Sequence[Tensor] = torch._foreach_norm([each.detach() for each in gradients], 2, dtype)
        return [torch.stack(list(norms))]
    small = [each for each in gradients if each.is_cpu and each.dtype == torch.float32 and each.numel() < _CHUNK]
    if len(small) < 2:
        return [chunk_norms(gradient) for gradient in gradients]
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
    """The L2 norm of all ranks' gradients. The host does not wait for it.

    Upstream copies each gradient to fp64, which costs more than the whole update, reduces the norm of each group by
    itself, and reads it back several times.

    Args:
        gradients: This rank's.
        group: The ranks.

    Returns:
        A scalar in fp32, on the device; infinite or NaN if a gradient is.
    """
    norms = _all_chunk_norms(list(gradients))
    device = get_accelerator().current_device_name()
    square = torch.cat(norms).double().square().sum().float() if norms else torch.zeros((), device=device)
    dist.all_reduce(square, group=group)
    return square.sqrt()


def clip_coefficient(limit: float, norm: Tensor) -> Tensor:
    """What gradients of this norm are multiplied with, as in ``torch.nn.utils.clip_grad_norm_``: NaN for NaN."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


class ReadsGradientsOnce(SparesReports):
    """Overrides on upstream's optimizers of stages 1 to 3.

    At some stages upstream skips a step whose gradient is not finite, also where there is no loss scale. DDP does not.
    So the norm decides in fp16, or where the config asks for it (``check_grad_overflow`` in bf16). Elsewhere upstream
    sees a norm of zero, and the host does not wait for the device.

    Attributes:
        norm_of_step: The norm of the last step's gradients, as they are scaled; None before the first step.
    """

    norm_of_step: Tensor | None = None
    #: The norm that has answered :meth:`has_overflow`, until the same step asks for it.
    _finite_norm: Tensor | None = None

    def has_overflow(self: Any, partition_gradients: bool = True) -> bool:
        """Whether a gradient of any rank is not finite: then the norm is, and the step needs the norm anyway.

        Upstream reads all gradients and lets the host wait once more.
        """
        if self._upstream_knows_better():
            return bool(super().has_overflow(partition_gradients))  # type: ignore[misc]
        norm = self.norm_of_averages().cpu()
        self._finite_norm = norm if norm.isfinite() else None
        return self._finite_norm is None

    def scaled_global_norm(self: Any, norm_type: int = 2) -> Tensor:
        """The norm of the averaged gradients of stages 1 and 2 for the step, as they are scaled."""
        if norm_type != 2:
            return super().scaled_global_norm(norm_type)  # type: ignore[misc]
        return self._norm_for_step()

    def _get_norm_groups(self: Any) -> list[Tensor]:
        """The same for stage 3: upstream combines the norms of groups, and gets one."""
        return [self._norm_for_step()]

    def norm_of_averages(self: Any) -> Tensor:
        """The norm of the averaged gradients as they are; infinite or NaN if a gradient is."""
        if self._upstream_knows_better():
            has_groups = not hasattr(self, "bit16_groups")  # stage 3
            norms = super()._get_norm_groups() if has_groups else [super().scaled_global_norm()]  # type: ignore[misc]
            norm = torch.linalg.vector_norm(torch.stack([torch.as_tensor(each, dtype=torch.float32) for each in norms]))
            invalid = any(float(each) < 0 or not math.isfinite(each) for each in norms)  # -1: upstream's
            return torch.full_like(norm, self._nan_or_infinity()) if invalid else norm
        groups = self.bit16_groups if hasattr(self, "bit16_groups") else self.fp16_groups  # stages 1 and 2, stage 3
        gradients = chain.from_iterable(self.averaged_gradients[index] for index in range(len(groups)))
        # Upstream marks padding at stages 1 and 2, and skips it.
        return global_norm((g for g in gradients if not getattr(g, "_zero_padding", False)), self.dp_process_group)

    def unscale_and_clip_grads(self: Any, gradients: Any, total_norm: Tensor) -> None:
        """Clip as torch does where upstream has not seen the norm; skip the pass if there is nothing to do."""
        if self._skips_steps():
            if self.loss_scale != 1 or self.clip_grad > 0:
                super().unscale_and_clip_grads(gradients, total_norm)  # type: ignore[misc]
        elif self.clip_grad > 0:
            coefficient = clip_coefficient(self.clip_grad, self.norm_of_step)
            for grad in self._read_by_optimizer(gradients):
                grad.mul_(coefficient.to(grad.device))

    def _nan_or_infinity(self: Any) -> float:
        """What the norm is, where upstream only says that it is not finite."""
        of_params = getattr(self, "norm_for_param_grads", {}).values()  # this rank's, under offload
        any_nan = torch.tensor(any(math.isnan(each) for each in of_params), dtype=torch.float32)
        any_nan = any_nan.to(get_accelerator().current_device_name())
        dist.all_reduce(any_nan, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        return math.nan if any_nan else math.inf

    def _read_by_optimizer(self: Any, gradients: Any) -> Iterable[Tensor]:
        """What upstream unscales: at stage 3 it names a group of parameters."""
        if isinstance(gradients, int):
            return [self.fp32_partitioned_groups_flat[gradients].grad]
        return chain.from_iterable(each if isinstance(each, list) else [each] for each in gradients)

    def _norm_for_step(self: Any) -> Tensor:
        """What upstream decides by: the norm, or zero where nothing is to be decided."""
        norm, self._finite_norm = self._finite_norm, None
        self.norm_of_step = self.norm_of_averages() if norm is None else norm
        return self.norm_of_step.cpu() if self._skips_steps() else torch.zeros(())

    def _skips_steps(self: Any) -> bool:
        """Whether a step whose gradient is not finite is left out."""
        return bool(self.gradient_accumulation.engine.skips_steps())

    def _upstream_knows_better(self) -> bool:
        flags = ("cpu_offload", "offload_optimizer", "has_moe_layers", "use_muon")
        return any(getattr(self, flag, False) for flag in flags)
