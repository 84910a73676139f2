"""A request to clip gradients. It does not import DeepSpeed, because the audit of other strategies needs it too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from torch import Tensor


class Clip(NamedTuple):
    """How to clip the averaged, unscaled gradient of one step.

    Attributes:
        limit: The largest global L2 norm, or the largest absolute value of one element.
        algorithm: ``"norm"`` or ``"value"``.
    """

    limit: float
    algorithm: Literal["norm", "value"]

    def clamp(self, *grads: Tensor | None) -> None:
        """Clamp averaged, unscaled gradients in place if the algorithm is ``"value"``."""
        if self.algorithm == "value":
            for grad in grads:
                if grad is not None:
                    grad.clamp_(-self.limit, self.limit)

    @contextmanager
    def by_norm_in(self, optimizer: Any) -> Iterator[None]:
        """Let a DeepSpeed optimizer clip within its ``step()`` if the algorithm is ``"norm"``.

        Relies on upstream: every optimizer reads ``self.clip_grad`` (0: no clipping) in its step.
        """
        configured = optimizer.clip_grad
        if self.algorithm == "norm":
            optimizer.clip_grad = self.limit
        try:
            yield
        finally:
            optimizer.clip_grad = configured
