"""Optimizers that evaluate the loss several times within one step, such as LBFGS: at stage 0, in full precision."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from lightning_zeroplus.gradients.patches.specialize import specialize


def needs_closure(optimizer: Any) -> bool:
    """Whether a torch optimizer evaluates the loss within its step: LBFGS, or one whose step requires a closure."""
    steps = (vars(cls)["step"] for cls in type(optimizer).__mro__ if "step" in vars(cls))
    closures = filter(None, (inspect.signature(step).parameters.get("closure") for step in steps))
    return any(closure.default is closure.empty for closure in closures)


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
        return super().step(closure or self.closure())  # type: ignore[misc]

    def closure(self) -> Callable[[], Any] | None:
        """The engine's closure, for one step; None outside of the engine's step."""
        if self.again is None:
            return None
        known = [self.first]
        return lambda: known.pop() if known else self._evaluate()

    def _evaluate(self) -> Any:
        assert self.again is not None
        with self.accumulation.together(), self.accumulation.engine.outside_step(), torch.enable_grad():
            loss = self.again()
        self.accumulation.finalize()
        return loss


def evaluates_again(optimizer: Any, accumulation: Any) -> None:
    """Give an optimizer :class:`EvaluatesAgain`.

    A scheduler that was made before has wrapped the ``step`` of the class, and so goes around the mixin.

    Args:
        optimizer: The torch optimizer.
        accumulation: The engine's gradient accumulation.
    """
    specialize(optimizer, EvaluatesAgain)
    optimizer.accumulation = accumulation
    wrapped = vars(optimizer).get("step")
    if wrapped is None or hasattr(wrapped, "_evaluates_again"):
        return

    @wraps(wrapped)
    def step(closure: Callable[[], Any] | None = None) -> Any:
        if closure is None and isinstance(optimizer, EvaluatesAgain):
            closure = optimizer.closure()
        return wrapped(closure)

    optimizer.step = step
    optimizer.step._evaluates_again = True


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
