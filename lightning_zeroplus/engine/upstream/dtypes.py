"""Dtypes of parameters: which ones a stage can train, and layers whose statistics have another dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_zeroplus.gradients.patches.specialize import generalize, specialize

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


class _Promoted(TorchFunctionMode):
    """Cast the weight and bias of normalization layers to the dtype of their statistics within."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (nn.functional.batch_norm, nn.functional.instance_norm):
            mean = kwargs["running_mean"] if "running_mean" in kwargs else args[1]
            for name in ("weight", "bias"):
                if mean is not None and kwargs.get(name) is not None:
                    kwargs[name] = kwargs[name].to(mean.dtype)
        return func(*args, **kwargs)


class _PromotedForward:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run as under autocast: activations in 16 bits; statistics, weight and bias in fp32."""
        with _Promoted():
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def promote_normalization(module: nn.Module) -> Callable[[], None]:
    """Let layers with fp32 running statistics and 16-bit parameters run, for which torch requires one dtype.

    Args:
        module: The module, after its parameters were cast.

    Returns:
        A function that undoes it.
    """
    changed = []
    for layer in module.modules():
        if not isinstance(layer, nn.modules.batchnorm._NormBase):
            continue  # reading the `weight` of other layers may have side effects, as with spectral norm
        mean, weight = layer.running_mean, layer.weight
        if mean is not None and weight is not None and mean.dtype != weight.dtype:
            changed.append(specialize(layer, _PromotedForward))

    def undo() -> None:
        for layer in changed:
            generalize(layer, _PromotedForward)

    return undo
