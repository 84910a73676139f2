"""Optimizers that evaluate the loss several times within a step, as LBFGS does: at stage 0, in full precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class EvaluatesAgain:
    """Mixin for such a torch optimizer: upstream steps it without a closure, and the engine has one for it.

    Attributes:
        again: Differentiates the loss once more, and returns it; None: the optimizer steps without it.
        first: The loss that has been differentiated already.
    """

    gradient_accumulation: Any
    again: Callable[[], Any] | None = None
    first: Any = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As the optimizer's own step, with the engine's closure where upstream gives none."""
        if closure is not None or self.again is None:
            return super().step(closure)  # type: ignore[misc]
        known = [self.first]
        return super().step(lambda: known.pop() if known else self._evaluate())  # type: ignore[misc]

    def _evaluate(self) -> Any:
        assert self.again is not None
        with self.gradient_accumulation.engine.outside_step(), torch.enable_grad():
            loss = self.again()
        self.gradient_accumulation.finalize()
        return loss


@contextmanager
def evaluating(optimizer: Any, loss: Any, again: Callable[[], Any]) -> Iterator[None]:
    """Around a step of the engine: ``optimizer`` may evaluate the loss several times.

    Args:
        optimizer: The torch optimizer; nothing happens unless it has :class:`EvaluatesAgain`.
        loss: What has been differentiated.
        again: Differentiates the loss once more, and returns it.
    """
    if not isinstance(optimizer, EvaluatesAgain):
        yield
        return
    optimizer.first, optimizer.again = loss, again
    try:
        yield
    finally:
        optimizer.first = optimizer.again = None
