"""Tensors that share a weight's memory, and that ``configure_optimizers`` keeps: under DDP they are on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_zeroplus.weights.holders import held_weights


@contextmanager
def configuring_optimizers(module: nn.Module, stage: int, device: torch.device) -> Iterator[None]:
    """Around ``configure_optimizers``: move the weights to the device first, as DDP does.

    At stage 3 they stay on the host until they are partitioned, because the device need not hold them all. A tensor
    that is kept then has host memory, which no weight has afterwards.

    Raises:
        MisconfigurationException: If such a tensor is kept at stage 3 on a GPU: it would not follow its weight.
    """
    if device.type == "cpu":
        yield
        return
    if stage < 3:
        module.to(device)
        yield
        return
    before = {id(param) for param, _ in held_weights(module)}
    yield
    kept = {id(param) for param, _ in held_weights(module)} - before
    names = [name for name, param in module.named_parameters() if id(param) in kept]
    if names:
        raise MisconfigurationException(
            f"`configure_optimizers` keeps tensors that share the memory of {', '.join(names)}, such as `param.data` or"
            " `param.detach()`. At ZeRO stage 3 weights go to the GPU after it, so these tensors would not follow."
            " Take them in `on_fit_start`, or keep copies."
        )
