"""The casts of a precision, as in Lightning's plugins for DDP. Lightning's plugins for DeepSpeed cast other tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
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


_LOW = {"bf16": torch.bfloat16, "16": torch.float16}


def low_precision_dtype(precision: str) -> torch.dtype | None:
    """The 16-bit dtype of the parameters: under ``bf16-true`` and ``16-true``; None for the other precisions."""
    bits, _, kind = precision.partition("-")
    return _LOW.get(bits) if kind == "true" else None


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The dtype of ``torch.autocast``: under ``bf16-mixed`` and ``16-mixed``; None for the other precisions."""
    bits, _, kind = precision.partition("-")
    return _LOW.get(bits) if kind == "mixed" else None


def computed_dtype(precision: str) -> torch.dtype | None:
    """The 16-bit dtype of activations, with 16-bit parameters or under autocast; None for the other precisions."""
    return autocast_dtype(precision) or low_precision_dtype(precision)


def scales_losses(precision: str) -> bool:
    """Whether fp32 parameters are trained with a loss scale: under ``16-mixed``, as by torch's ``GradScaler``."""
    return autocast_dtype(precision) is torch.float16


class ConvertsAsUnderDDP:
    """Mixin for Lightning's precision plugins for DeepSpeed: the Trainer's and Fabric's.

    Attributes:
        loss_scale: Settings of the section ``fp16``, from the ``GradScaler`` of the plugin that this one replaces.
    """

    precision: Any
    loss_scale: Mapping[str, int] = MappingProxyType({})
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

        Complex ones keep their dtype: a cast would drop their imaginary part. ``32-true`` and the ``mixed`` forms cast
        nothing, as under DDP.
        """
        return cast_real(module, self._desired_dtype) if self._converts else module

    def convert_input(self, data: Any) -> Any:
        """Cast the real floating-point tensors of a batch under ``bf16-true``, ``16-true`` and ``64-true``."""
        return super().convert_input(data) if self._converts else data  # type: ignore[misc]

    def tensor_init_context(self) -> AbstractContextManager[None]:
        """Set the default dtype within, under the ``true`` forms. ``32-true`` keeps the default dtype of the user."""
        return super().tensor_init_context() if self._converts else nullcontext()  # type: ignore[misc]

    def forward_context(self) -> AbstractContextManager[None]:
        """Surround a step of the module, as under DDP.

        The ``true`` forms make new tensors in their dtype. The ``mixed`` forms run under ``torch.autocast``.
        """
        return self.tensor_init_context() if autocast_dtype(self.precision) is None else self._autocast()

    def _autocast(self, cache_enabled: bool | None = None) -> torch.autocast:
        from deepspeed.accelerator import get_accelerator

        device, dtype = get_accelerator().device_name(), autocast_dtype(self.precision)
        return torch.autocast(device, dtype=dtype, cache_enabled=cache_enabled)


class ZeroPlusFabricPrecision(ConvertsAsUnderDDP, DeepSpeedPrecision):
    """The plugin of :class:`~lightning_zeroplus.ZeroPlusFabricStrategy`.

    If the plugin or the strategy overrides ``backward()``, Fabric refuses ``loss.backward()`` and
    ``torch.autograd.grad``. Both are correct with our engine.
    """

    backward = Precision.backward

    def convert_input(self, data: Any) -> Any:
        """Cast a module's inputs. Under Fabric, unlike under the Trainer, the ``mixed`` forms cast them, too."""
        if autocast_dtype(self.precision) is None:
            return super().convert_input(data)
        return DeepSpeedPrecision.convert_input(self, data)

    def convert_output(self, data: Any) -> Any:
        """Cast a module's outputs to the default dtype; ``32-true`` casts nothing."""
        return data if self.precision == "32-true" else super().convert_output(data)


#: What Fabric makes of ``precision=``, for DDP and for DeepSpeed.
_OF_FABRIC = (Precision, HalfPrecision, MixedPrecision, DoublePrecision, DeepSpeedPrecision)

#: How torch's ``GradScaler`` changes its scale, and how DeepSpeed does: the factors of growth and of backoff.
_FACTORS = (2.0, 0.5)
#: The settings of a ``GradScaler`` that is given none, which are the engine's: Fabric makes one for ``16-mixed``.
_OF_GRAD_SCALER = {"initial_scale_power": 16, "loss_scale_window": 2000}


def loss_scale_settings(plugin: Any) -> dict[str, int]:
    """What the section ``fp16`` of a config needs to scale losses as the plugin's ``GradScaler`` would.

    Args:
        plugin: A precision plugin of the Trainer or of Fabric.

    Returns:
        The settings; empty without a ``GradScaler``, or if it has torch's settings.

    Raises:
        MisconfigurationException: If DeepSpeed cannot scale like it.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return {}
    factors = (scaler.get_growth_factor(), scaler.get_backoff_factor())
    fraction, exponent = math.frexp(scaler.get_scale())
    if factors != _FACTORS or fraction != 0.5 or exponent < 1:
        raise MisconfigurationException(
            f"`MixedPrecision(scaler=...)` begins with a scale of {scaler.get_scale()}, and changes it by the factors"
            f" {factors}. Under ZeRO the engine scales losses: it begins with a power of two, and its factors are"
            f" {_FACTORS}. Give `GradScaler` such settings, or leave it out."
        )
    settings = {"initial_scale_power": exponent - 1, "loss_scale_window": scaler.get_growth_interval()}
    return {} if settings == _OF_GRAD_SCALER else settings


def fabric_precision(plugin: Precision | None) -> Precision | None:
    """Ours in the place of a plugin that Fabric has made; others are left alone.

    Raises:
        MisconfigurationException: For TransformerEngine, whose layers keep states of their own; and for a
            ``GradScaler`` that DeepSpeed cannot scale like.
    """
    if isinstance(plugin, TransformerEnginePrecision):
        raise MisconfigurationException(
            f"`Fabric(precision={plugin.precision!r})` with ZeRO: the scales of TransformerEngine are no parameters,"
            ' and would not be partitioned. Use `precision="bf16-true"`.'
        )
    if type(plugin) not in _OF_FABRIC:
        return plugin
    ours = ZeroPlusFabricPrecision(str(cast(Precision, plugin).precision))
    ours.loss_scale = loss_scale_settings(plugin)
    return ours
