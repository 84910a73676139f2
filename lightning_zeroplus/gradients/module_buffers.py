"""The buffers of all ranks follow the buffers of rank 0, where they do under DDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from lightning_zeroplus.gradients.ranks.from_rank_0 import broadcast_tensors


class BufferBroadcast:
    """Gives every rank the buffers of rank 0 before a forward.

    Each rank updates its own buffers in a forward: running statistics of a ``BatchNorm``, codebooks and queues that are
    moving averages. Without the broadcast they diverge. A rank would then train or validate another model than the one
    that rank 0 saves.

    Args:
        module: The module. If it has no buffers now, those that are registered later are not broadcast, as under DDP.
        device: The device of the broadcast.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._any = any(True for _ in module.buffers())
        self._within = 0
        self._due = True

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Wrap forwards whose gradients only accumulate, as in DDP's ``no_sync()``."""
        self._within += 1
        try:
            yield
        finally:
            self._within -= 1

    @contextmanager
    def training_step(self, automatic: bool) -> Iterator[None]:
        """Wrap Lightning's ``training_step``.

        Under manual optimization Lightning's DDP marks no forward as one to synchronize. Its ranks keep their own
        buffers then, and so do ours: the same loop must see the same buffers.

        Args:
            automatic: Whether the module uses automatic optimization.
        """
        with nullcontext() if automatic else self.accumulating():
            yield

    def before_forward(self) -> None:
        """Broadcast if the previous forward was one that DDP synchronizes: with grad, and outside of ``no_sync()``."""
        due, self._due = self._due, torch.is_grad_enabled() and not self._within
        if due and self._any:
            self._broadcast()

    def _broadcast(self) -> None:
        # Looked up each time, as DDP does: a module may replace a buffer, and register further ones.
        broadcast_tensors(self._module.buffers(), self._device)
