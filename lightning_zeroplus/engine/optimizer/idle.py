"""An optimizer for a fit that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer


class IdleOptimizer(Optimizer):
    """Has the trainable parameters and leaves them as they are.

    ZeRO makes its partitions of an optimizer's parameters, and averages gradients into them. A LightningModule without
    an optimizer may still read its gradients, or write its weights itself.

    Args:
        params: The trainable parameters.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.0})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure and change nothing."""
        return None if closure is None else closure()
