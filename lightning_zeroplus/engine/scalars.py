"""Parameters without dimensions, such as a learned temperature, which DeepSpeed cannot broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ScalarsAsBytes(TorchFunctionMode):
    """Within: a tensor without dimensions can be viewed as bytes, like any other.

    DeepSpeed from 0.19 on broadcasts parameters as ``param.data.view(torch.uint8)``: when it builds an engine, when it
    partitions them, and after ``GatheredParameters(modifier_rank=...)``.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let ``scalar.view(torch.uint8)`` be that of one element; call anything else."""
        if func is Tensor.view and args[1:] == (torch.uint8,) and args[0].dim() == 0:
            return args[0].view(1).view(torch.uint8)
        return func(*args, **(kwargs or {}))
