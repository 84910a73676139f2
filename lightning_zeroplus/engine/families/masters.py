"""The weights that the user sees are those that the next step starts from.

Upstream's optimizers keep fp32 master weights and copy them over the module's after each step: what was written to the
module's weights in between is thrown away. In fp32 the master weights are given the module's memory, and there is
nothing to copy. Where they differ in dtype or device, a weight that is not the rounded master weight has been written,
and takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor, nn


def share_memory(master: Tensor, weights: Tensor) -> bool:
    """Give master weights the memory of the module's weights, if they are alike.

    Args:
        master: The tensor that the optimizer updates; flat, of as many elements as ``weights``.
        weights: A flat view of the module's weights.

    Returns:
        Whether they share it.
    """
    if master.dtype != weights.dtype or master.device != weights.device or master.numel() != weights.numel():
        return False
    if master.data_ptr() != weights.data_ptr():
        master.data = weights.detach().view(master.shape)
    return True


@torch.no_grad()
def take_over(master: Tensor, weights: Tensor) -> None:
    """Replace those master weights whose rounded values are not the module's weights, in place.

    Args:
        master: Of any shape, fp32.
        weights: The module's weights, of as many elements.
    """
    there = weights.detach().to(master.device).view(master.shape)
    written = there != master.to(there.dtype)
    master.copy_(torch.where(written, there.to(master.dtype), master))


class Homes:
    """Where in a flat buffer each parameter lies: ``param.data = other`` moves it out.

    It is brought back for a step or a checkpoint, and given its memory again afterwards: the user may go on with
    ``other``, as under DDP.

    Args:
        params: Parameters that are views of flat buffers.
        names: Their names, for messages.
    """

    def __init__(self, params: Iterable[nn.Parameter], names: Iterable[str]) -> None:
        self._homes = [(name, param, param.data, param.data_ptr()) for name, param in zip(names, params, strict=True)]
        self._outside: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    def bring_back(self) -> None:
        """Copy what was assigned to ``param.data`` into the flat buffer, and let the parameter be a view of it again.

        Raises:
            RuntimeError: If a parameter has another shape or dtype than when the fit began; nothing has been updated.
        """
        self._outside = []
        for name, param, home, address in self._homes:
            if param.data_ptr() == address:
                continue
            if param.shape != home.shape or param.dtype != home.dtype:
                raise RuntimeError(
                    f"`param.data` of {name!r} was assigned a {param.dtype} tensor of shape {tuple(param.shape)}; it"
                    f" was {home.dtype} of shape {tuple(home.shape)} when the fit began. ZeRO has one buffer for all"
                    " weights: keep shape and dtype, or change them before the fit."
                )
            with torch.no_grad():
                home.copy_(param.data)
            self._outside.append((param, param.data, home))
            param.data = home

    @torch.no_grad()
    def follow(self) -> None:
        """Give the parameters that were brought back their memory again, with the values that they have now."""
        for param, outside, home in self._outside:
            outside.copy_(home)
            param.data = outside
        self._outside = []


class FollowsModule:
    """The side of a gradient accumulation that knows of weights written by the user."""

    def take_written_weights(self) -> None:
        """Let the step start from the module's weights, which may have been written since the last one."""

    def follow_weights(self) -> None:
        """Let weights that lie outside of the optimizer's memory follow it, after a step."""

    @contextmanager
    def written_weights(self) -> Iterator[None]:
        """Within: what the optimizer has are the module's weights."""
        with torch.no_grad():
            self.take_written_weights()
        yield
        self.follow_weights()


def with_masters(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters of ``FP16_Optimizer`` or ``FP16_UnfusedOptimizer``, each with its fp32 master weights."""
    for group, params in enumerate(optimizer.fp16_groups):
        if isinstance(optimizer, FP16_UnfusedOptimizer):
            yield from zip(params, optimizer.fp32_groups[group], strict=True)
        else:
            masters = optimizer.fp32_groups_flat[group].split([param.numel() for param in params])
            yield from ((param, master.view_as(param)) for param, master in zip(params, masters, strict=True))
