"""The loss scale of fp16."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from torch import Tensor


class GrowsAsGradScaler(DynamicLossScaler):
    """Upstream's dynamic loss scale, which grows when torch's ``GradScaler`` does: upstream's grows one step later.

    Upstream counts the steps after the last overflow without the first one.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.last_overflow_iter -= 1

    def update_scale(self, overflow: bool) -> None:
        """Note a step that was skipped because of an overflow, or not."""
        super().update_scale(overflow)
        if overflow:
            self.last_overflow_iter -= 1


def loss_scaler(section: Any) -> DynamicLossScaler | LossScaler:
    """The loss scale of fp32 weights that are trained under autocast in fp16.

    Args:
        section: Upstream's config of fp16, of which only the loss scale is used.
    """
    if section.loss_scale:
        return LossScaler(section.loss_scale)
    return GrowsAsGradScaler(**section.dynamic_loss_scale_args())


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
    """The part of an engine that knows the loss scale; it comes before upstream's class.

    Attributes:
        loss_scaler: The loss scale of fp32 weights. None: there is none, or the weights are fp16, and upstream's
            optimizer has it.
    """

    optimizer: Any
    loss_scaler: DynamicLossScaler | LossScaler | None = None
    _running_engine_backward: bool

    def has_loss_scale(self) -> bool:
        """Whether losses are scaled, however small the scale: in fp16."""
        return self.loss_scaler is not None or bool(self.fp16_enabled())  # type: ignore[attr-defined]

    def loss_scale_factor(self) -> float:
        """What a loss is multiplied with before its backward (fp16), else 1."""
        if self.loss_scaler is not None:
            return float(self.loss_scaler.cur_scale)
        return float(self.optimizer.loss_scale) if self.has_loss_scale() else 1.0

    def _give_loss_scaler(self) -> None:
        """Replace the scale of 1 that upstream's optimizers of stages 1 to 3 have for fp32 weights."""
        if self.loss_scaler is not None and isinstance(self.optimizer, ZeROOptimizer):
            self.optimizer.loss_scaler = self.loss_scaler
            self.optimizer.check_grad_overflow = True  # older releases look at fp32 gradients only if told to

    def scaled_for_upstream(self, loss: Tensor) -> Tensor:
        """Multiply a loss with its scale where upstream does not: upstream scales losses for ZeRO only."""
        if not loss.requires_grad:
            loss.backward()  # raises torch's error; upstream's says that the loss is no scalar
        if self.loss_scaler is not None:
            loss = loss.to(torch.promote_types(loss.dtype, torch.float32))  # fp16 may have no room for the scale
        if self.has_loss_scale() and not isinstance(self.optimizer, ZeROOptimizer):
            loss = loss.float() * self.loss_scale_factor()
        return loss

    def skips_steps(self) -> bool:
        """Whether a step whose gradient is not finite is skipped: in fp16, and in bf16 if the config asks for it."""
        if self.has_loss_scale():
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
