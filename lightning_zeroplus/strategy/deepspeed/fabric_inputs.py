"""Where Fabric's modules take their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def move_inputs(module: nn.Module, device: torch.device) -> None:
    """Let ``module`` move tensors among its inputs to ``device``, as ``DistributedDataParallel`` does on a GPU."""
    if device.type == "cpu":
        return

    def move(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))

    module.register_forward_pre_hook(move, with_kwargs=True)
