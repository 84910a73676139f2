"""``zero_grad()``, for gradients that are not kept in ``param.grad``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_zeroplus.engine.reduction.life import Event, Life

if TYPE_CHECKING:
    from lightning_zeroplus.engine.host import EngineHost
    from lightning_zeroplus.engine.reduction.local_sums import Guard


class RoutedZeroGrad:
    """Mixin for the optimizer that the user sees: ``zero_grad()`` discards every gradient since the last step.

    Lightning's ``LightningOptimizer`` inherits the *class* of the optimizer it wraps. So ``zero_grad`` runs with the
    wrapper as ``self``, and upstream's bookkeeping would land on the wrapper. Attribute look-up does reach the wrapped
    optimizer, and so its accumulation, a :class:`ZeroesGradients`.
    """

    gradient_accumulation: ZeroesGradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the accumulated gradients.

        Args:
            set_to_none: If True, the next step leaves parameters alone that get no gradient. If False, those that had a
                gradient have a gradient of zero.
        """
        self.gradient_accumulation.zero_grad(set_to_none)


class ZeroesGradients:
    """The part of a gradient accumulation that implements ``zero_grad()``."""

    engine: EngineHost
    optimizer: Any
    guard: Guard | None
    params: list[nn.Parameter]
    averaged: set[int]
    used: set[int]
    life: Life

    def zero_grad(self, set_to_none: bool = True, part: int | None = None) -> None:
        """Discard every gradient since the last step, as ``zero_grad()`` does under DDP.

        Args:
            set_to_none: If False, the parameters that had a gradient get a gradient of zero, and a step updates them.
            part: The number of one of several optimizers: discard the gradients of its parameters only.
        """
        if self.engine.stepping:
            self._zero_grad_in_step()
            return  # upstream's own call in the middle of step(), which still needs the averaged gradients
        if self.guard is not None:
            self.guard.before_zero_grad(not self.life.is_empty)
        if part is not None:
            self.zero_part(part, set_to_none)  # type: ignore[attr-defined]
            return
        zeros = set() if set_to_none else self._have_gradients()
        self.discard()  # type: ignore[attr-defined]
        self.forget_used(range(len(self.params)))  # type: ignore[attr-defined]
        self._base_zero_grad()
        if zeros:
            self._keep_zeros(zeros)

    def _have_gradients(self) -> set[int]:
        """The parameters that would have a gradient under DDP, used up or not."""
        if self.life.is_waiting:
            with torch.no_grad():
                self._make_averaged()  # type: ignore[attr-defined]
        return self.averaged | self.used

    def _keep_zeros(self, indices: set[int]) -> None:
        """Give these parameters a gradient of zero; the gradients in their partitions were dropped."""
        self.averaged |= indices
        self.life.goes_on(Event.SET)

    def _zero_grad_in_step(self) -> None:
        self._base_zero_grad()

    def _base_zero_grad(self) -> None:
        optimizer: Any = self.optimizer
        super(RoutedZeroGrad, optimizer).zero_grad(set_to_none=True)  # type: ignore[misc]
