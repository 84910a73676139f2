"""``zero_grad()``, for gradients that ``param.grad`` does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lightning_zeroplus.engine.host import EngineHost
    from lightning_zeroplus.engine.reduction.local_sums import Guard


class RoutedZeroGrad:
    """Mixin for the optimizer the user sees: ``zero_grad()`` discards every gradient since the last step.

    Lightning's ``LightningOptimizer`` inherits the *class* of the optimizer it wraps, so ``zero_grad`` runs with the
    wrapper as ``self`` and upstream's bookkeeping lands on the wrapper. Attribute look-up does reach the wrapped
    optimizer, and so its accumulation, which has :class:`ZeroesGradients`.
    """

    gradient_accumulation: ZeroesGradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the accumulated gradients. Their memory is always released.

        Args:
            set_to_none: Leave parameters alone in the next step that get no gradient. False: they have one of zero.
        """
        self.gradient_accumulation.zero_grad(set_to_none)


class ZeroesGradients:
    """The side of a gradient accumulation that ``zero_grad()`` is handed to."""

    engine: EngineHost
    optimizer: Any
    guard: Guard | None
    averaged: set[int]
    used: set[int]
    pending: bool
    unreduced: bool

    def zero_grad(self, set_to_none: bool = True, part: int | None = None) -> None:
        """Forget every gradient since the last step, as ``zero_grad()`` does under DDP.

        Args:
            set_to_none: False: the parameters that had a gradient have one of zero, with which a step updates them.
            part: Only those of this one of several optimizers.
        """
        if self.engine.stepping:
            self._zero_grad_in_step()
            return  # upstream's own call in the middle of step(), which still needs the averaged gradients
        if self.guard is not None:
            self.guard.before_zero_grad(self.pending)
        if part is not None:
            self.zero_part(part, set_to_none)  # type: ignore[attr-defined]
            return
        zeros = set() if set_to_none else self._have_gradients()
        self.discard()  # type: ignore[attr-defined]
        self.used = set()
        self._base_zero_grad()
        if zeros:
            self._keep_zeros(zeros)

    def _have_gradients(self) -> set[int]:
        """The parameters of which DDP would show a gradient, used up or not."""
        if self.unreduced:
            with torch.no_grad():
                self._make_averaged()  # type: ignore[attr-defined]
        return self.averaged | self.used

    def _keep_zeros(self, indices: set[int]) -> None:
        """Let these parameters have a gradient of zero; their partitions have none."""
        self.averaged |= indices
        self.pending = True

    def _zero_grad_in_step(self) -> None:
        self._base_zero_grad()

    def _base_zero_grad(self) -> None:
        optimizer: Any = self.optimizer
        super(RoutedZeroGrad, optimizer).zero_grad(set_to_none=True)  # type: ignore[misc]
