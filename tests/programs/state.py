"""The weights of a module, whole, however a strategy has cut them."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers on the CPU by name, gathered where they are cut. All ranks call it.

    Names that share a tensor are all there, so that a tie which is lost shows.
    """
    partitioned = [param for param in module.parameters() if hasattr(param, "ds_id")]
    context: Any = nullcontext()
    if partitioned:
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        context = GatheredParameters(partitioned)
    named = chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    with context, torch.no_grad():
        return {name: _whole(tensor) for name, tensor in named}


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()
