"""Optimizers that evaluate the loss several times within one step, such as LBFGS: at stage 0, in full precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class EvaluatesAgain:
    """Mixin for such a torch optimizer: upstream calls its ``step()`` without a closure, so the engine provides one.

    Attributes:
        accumulation: The engine's gradient accumulation.
        again: Differentiates the loss once more and returns it; None: the optimizer steps without a closure.
        first: The loss that has been differentiated already; the first evaluation returns it.
    """

    accumulation: Any
    again: Callable[[], Any] | None = None
    first: Any = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the optimizer's own step, with the engine's closure if upstream passes none."""
        if closure is not None or self.again is None:
            return super().step(closure)  # type: ignore[misc]
        known = [self.first]
        return super().step(lambda: known.pop() if known else self._evaluate())  # type: ignore[misc]

    def _evaluate(self) -> Any:
        assert self.again is not None
        with self.accumulation.together(), self.accumulation.engine.outside_step(), torch.enable_grad():
            loss = self.again()
        self.accumulation.finalize()
        return loss


@contextmanager
def evaluating(optimizer: Any, loss: Any, again: Callable[[], Any] | None) -> Iterator[None]:
    """Let ``optimizer`` evaluate the loss several times in the engine's step within.

    Args:
        optimizer: The torch optimizer; nothing happens unless it has :class:`EvaluatesAgain`.
        loss: The loss that has been differentiated already.
        again: Differentiates the loss once more and returns it; None: the step gets no closure.
    """
    if not isinstance(optimizer, EvaluatesAgain):
        yield
        return
    optimizer.first, optimizer.again = loss, again
    try:
        yield
    finally:
        optimizer.first = optimizer.again = None
