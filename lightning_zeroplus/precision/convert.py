"""Casts of real floating-point tensors only. A cast of a complex tensor would drop its imaginary part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn

from lightning_zeroplus.gradients.patches.specialize import generalize, specialize


def cast_real(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the real floating-point parameters and buffers of ``module`` in place.

    Hooks, ``grad_dtype`` and tied parameters are kept. ``Module.to()`` would cast complex ones too.
    """
    return module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


class _CastsReal:
    """Mixin for Lightning's plugin for ``bf16-true`` and ``16-true``."""

    _desired_input_dtype: torch.dtype

    def convert_module(self, module: nn.Module) -> nn.Module:
        return cast_real(module, self._desired_input_dtype)


@contextmanager
def casting_real(plugin: Any) -> Iterator[None]:
    """Let a precision plugin of Lightning cast real tensors only within."""
    if not isinstance(plugin, HalfPrecision):
        yield
        return
    specialize(plugin, _CastsReal)
    try:
        yield
    finally:
        generalize(plugin, _CastsReal)
