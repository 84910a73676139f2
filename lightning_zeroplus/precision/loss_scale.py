"""What a user reads of the loss scale in 16-mixed, where torch's ``GradScaler`` is under DDP."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException


class _Scale(Protocol):
    """The loss scale of an engine: DeepSpeed's ``LossScaler`` or ``DynamicLossScaler``."""

    cur_scale: float


class ReadOnlyScaler:
    """``trainer.precision_plugin.scaler``: the engine's loss scale, as torch's ``GradScaler`` would report it.

    The other methods of ``GradScaler`` are refused: the engine scales losses, looks for overflows and updates the scale
    itself.
    """

    def __init__(self) -> None:
        self._scale: _Scale | None = None

    def follow(self, scale: _Scale) -> None:
        """Report ``scale`` from now on; after the fit, its last value."""
        self._scale = scale

    def is_enabled(self) -> bool:
        """Whether losses are scaled: they are."""
        return True

    def get_scale(self) -> float:
        """What losses are multiplied with before their backward.

        Raises:
            MisconfigurationException: Before the first fit has an engine.
        """
        return float(self._known().cur_scale)

    def get_growth_factor(self) -> float:
        """What the scale is multiplied with after enough steps without an overflow; 1 if it is static."""
        return float(getattr(self._known(), "scale_factor", 1.0))

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied with after an overflow; 1 if it is static."""
        return 1.0 / self.get_growth_factor()

    def get_growth_interval(self) -> int:
        """After how many steps without an overflow the scale grows; 0 if it is static."""
        return int(getattr(self._known(), "scale_window", 0))

    def _known(self) -> _Scale:
        if self._scale is None:
            raise MisconfigurationException(
                "`trainer.precision_plugin.scaler` was read before the engine was made, which has the loss scale. Read"
                " it in `on_fit_start` or later."
            )
        return self._scale

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.amp.GradScaler, name):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        raise MisconfigurationException(
            f"`trainer.precision_plugin.scaler.{name}`: under ZeRO the engine scales losses, skips steps that overflow"
            ' and updates the scale. Leave it out; `ZeroPlusStrategy(config={"fp16": {"initial_scale_power": 12,'
            ' "loss_scale_window": 1000}})` sets where the scale begins and how often it grows.'
        )
