"""Dtypes of parameters: which ones a stage can train, and which gradients upstream does not reduce."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

# The dtypes that an engine casts in 16-bit precisions, as upstream's engine does.
_CAST = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_dtypes(module: nn.Module, stage: int, low: torch.dtype | None, trains: bool) -> None:
    """Refuse parameters that would be trained in another dtype than their own, before anything is built.

    Partitions are flat and hold fp32: there, complex numbers lose their imaginary part, float64 loses its precision,
    and bf16 would get fp32 master weights. Parameters that are not trained may have any dtype.

    Args:
        module: The module, before it is cast.
        stage: The ZeRO stage.
        low: The dtype to which real floating-point parameters are cast; None: they keep their own.
        trains: Whether the module will be trained.

    Raises:
        ValueError: Naming the first such parameter and the remedy.
    """
    if not trains or (stage == 0 and low is None):
        return
    for name, param in module.named_parameters():
        dtype = low if low is not None and param.dtype in _CAST else param.dtype
        if param.requires_grad and dtype != (low or torch.float32):
            kept = "fp32" if low is None else f"{low} with fp32 master weights"
            raise ValueError(
                f"The parameter {name!r} is of {param.dtype}, and ZeRO stage {stage} trains parameters in {kept}: it"
                ' would not be trained as under DDP. Use stage 0 with `precision="32-true"`, which trains every dtype;'
                f" or freeze it, or convert it before the fit{_remedy(param.dtype, low)}."
            )


def _remedy(dtype: torch.dtype, low: torch.dtype | None) -> str:
    if dtype.is_complex:
        return " (keep `torch.view_as_real(...)` of it as the parameter)"
    if low is None and dtype in (torch.bfloat16, torch.float16):
        name = {torch.bfloat16: "bf16", torch.float16: "16"}[dtype]
        return f' (`module.float()`, or let `precision="{name}-true"` do it for all)'
    return " (`module.float()`)"


class ReducesEveryDtype:
    """Mixin for an engine: lets it reduce float64 and complex gradients at stage 0, which upstream does not."""

    def _reduce_non_expert_gradients(self: Any, grads: list[Tensor], elements_per_buffer: int) -> None:
        """Let upstream reduce the dtypes that it supports; reduce each other gradient in its own dtype."""
        known = get_accelerator().supported_dtypes()
        super()._reduce_non_expert_gradients([grad for grad in grads if grad.dtype in known], elements_per_buffer)  # type: ignore[misc]
        others = [grad for grad in grads if grad.dtype not in known]
        for dtype in sorted({grad.dtype for grad in others}, key=str):
            same = [grad for grad in others if grad.dtype == dtype]
            configured, self.has_configured_wire_dtype = self.has_configured_wire_dtype, False
            try:
                self.allreduce_no_retain(same, self.seq_data_parallel_group, elements_per_buffer)
            finally:
                self.has_configured_wire_dtype = configured
