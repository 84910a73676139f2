"""The loss scale of fp16."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class UpdatesScaleLate:
    """Mixin for upstream's optimizers: a step divides gradients by the loss scale that they have.

    Upstream updates the scale in the step, before it divides: whenever the scale has grown, the gradient is halved.
    """

    _scale_update_waits = False

    def _update_scale(self, has_overflow: bool = False) -> None:
        """Lower the scale at once after an overflow, whose step is skipped; else wait for the end of the step."""
        self._scale_update_waits = not has_overflow
        if has_overflow:
            super()._update_scale(has_overflow)  # type: ignore[misc]

    def update_scale_late(self) -> None:
        """The step is done."""
        if self._scale_update_waits:
            self._scale_update_waits = False
            super()._update_scale(False)  # type: ignore[misc]


class ScalesLosses:
    """The part of an engine that knows the loss scale; it comes before upstream's class."""

    optimizer: Any
    _running_engine_backward: bool

    def loss_scale_factor(self) -> float:
        """What a loss is multiplied with before its backward (fp16), else 1."""
        if not self.fp16_enabled():  # type: ignore[attr-defined]
            return 1.0
        return float(self.optimizer.loss_scale)

    def skips_steps(self) -> bool:
        """Whether a step whose gradient is not finite is skipped: in fp16, and in bf16 if the config asks for it."""
        if self.fp16_enabled():  # type: ignore[attr-defined]
            return True
        return self.bfloat16_enabled() and bool(self._config.bfloat16_config.check_grad_overflow)  # type: ignore[attr-defined]

    def _update_loss_scale(self) -> None:
        """After a step, which may have no overflow for long enough to raise the scale."""
        if isinstance(self.optimizer, UpdatesScaleLate):
            self.optimizer.update_scale_late()

    def scale(self, loss: Tensor) -> Tensor:
        """Refuse upstream's way to scale a loss by hand in fp16: its backward would be taken for one without a scale.

        Raises:
            RuntimeError: If there is a loss scale.
        """
        if self.loss_scale_factor() != 1.0:
            raise RuntimeError(
                "`engine.scale(loss)`: call `engine.backward(loss)`, or `loss.backward()` without the scale, which its"
                " gradients get when they come."
            )
        return super().scale(loss)  # type: ignore[misc]

    def _backward_post_hook(self) -> None:
        """Let ``loss.backward()`` end: upstream refuses it without a loss scale, if the scale is dynamic."""
        if not self._running_engine_backward:
            self._manual_backward_expected = True
        super()._backward_post_hook()  # type: ignore[misc]
