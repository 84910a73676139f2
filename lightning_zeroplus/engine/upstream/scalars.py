"""Parameters that DeepSpeed cannot broadcast: without dimensions, such as a learned temperature, or not contiguous."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ScalarsAsBytes(TorchFunctionMode):
    """Let tensors without dimensions, or with another memory format, be viewed as bytes within, like any other.

    DeepSpeed from 0.19 on broadcasts parameters as ``param.data.view(torch.uint8)``: when it builds an engine, when it
    partitions them, and after ``GatheredParameters(modifier_rank=...)``. The bytes come in memory order, for example of
    ``torch.channels_last`` or of a transposed matrix, which is the same on all ranks.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let ``tensor.view(torch.uint8)`` view the memory of such a tensor; call anything else unchanged."""
        if func is Tensor.view and args[1:] == (torch.uint8,) and _is_odd(args[0]):
            tensor = args[0]
            return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return func(*args, **(kwargs or {}))


def _is_odd(tensor: Tensor) -> bool:
    return tensor.dim() == 0 or (not tensor.is_contiguous() and _is_dense(tensor))


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie one after the other in memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
