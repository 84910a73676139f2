"""The casts of a precision, as in Lightning's plugins for DDP. Lightning's plugins for DeepSpeed cast other tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from lightning.fabric.plugins import (
    DeepSpeedPrecision,
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_zeroplus.precision.convert import cast_real

#: For stage 0 only: the partitions of the other stages are fp32.
DOUBLE = "64-true"


def low_precision_dtype(precision: str) -> torch.dtype | None:
    """The 16-bit dtype of parameters and activations under ``precision``; None for the other precisions."""
    return {"bf16": torch.bfloat16, "16": torch.float16}.get(precision.split("-")[0])


class ConvertsAsUnderDDP:
    """Mixin for Lightning's precision plugins for DeepSpeed: the Trainer's and Fabric's."""

    precision: Any
    _desired_dtype: torch.dtype

    def __init__(self, precision: str) -> None:
        if precision == DOUBLE:
            self.precision, self._desired_dtype = precision, torch.float64
        else:
            super().__init__(precision)  # type: ignore[call-arg]

    @property
    def _converts(self) -> bool:
        return self.precision == DOUBLE or low_precision_dtype(self.precision) is not None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast the real floating-point parameters and buffers under ``bf16-true``, ``16-true`` and ``64-true``.

        Complex ones keep their dtype: a cast would drop their imaginary part. ``32-true`` casts nothing, as under DDP.
        The ``mixed`` forms cast nothing either; the engine casts the parameters.
        """
        return cast_real(module, self._desired_dtype) if self._converts and "true" in self.precision else module

    def convert_input(self, data: Any) -> Any:
        """Cast the real floating-point tensors of a batch to the precision's dtype; ``32-true`` casts nothing."""
        return super().convert_input(data) if self._converts else data  # type: ignore[misc]

    def convert_output(self, data: Any) -> Any:
        """Under Fabric, cast a module's outputs to the default dtype; ``32-true`` casts nothing."""
        return super().convert_output(data) if self._converts else data  # type: ignore[misc]

    def tensor_init_context(self) -> AbstractContextManager[None]:
        """Set the default dtype within, under the ``true`` forms. ``32-true`` keeps the default dtype of the user."""
        return super().tensor_init_context() if self._converts else nullcontext()  # type: ignore[misc]

    def forward_context(self) -> AbstractContextManager[None]:
        """Surround a step of the module: the ``true`` forms make new tensors in their dtype, as under DDP."""
        return self.tensor_init_context()


class ZeroPlusFabricPrecision(ConvertsAsUnderDDP, DeepSpeedPrecision):
    """The plugin of :class:`~lightning_zeroplus.ZeroPlusFabricStrategy`.

    If the plugin or the strategy overrides ``backward()``, Fabric refuses ``loss.backward()`` and
    ``torch.autograd.grad``. Both are correct with our engine.
    """

    backward = Precision.backward


#: What Fabric makes of ``precision=``, for DDP and for DeepSpeed.
_OF_FABRIC = (Precision, HalfPrecision, MixedPrecision, DoublePrecision, DeepSpeedPrecision)


def fabric_precision(plugin: Precision | None) -> Precision | None:
    """Ours in the place of a plugin that Fabric has made; others are left alone.

    Raises:
        MisconfigurationException: For TransformerEngine, whose layers keep states of their own.
    """
    if isinstance(plugin, TransformerEnginePrecision):
        raise MisconfigurationException(
            f"`Fabric(precision={plugin.precision!r})` with ZeRO: the scales of TransformerEngine are no parameters,"
            ' and would not be partitioned. Use `precision="bf16-true"`.'
        )
    if type(plugin) not in _OF_FABRIC:
        return plugin
    return ZeroPlusFabricPrecision(str(cast(Precision, plugin).precision))
