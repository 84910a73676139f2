"""What a 16-bit precision casts: real floating-point tensors. A cast of a complex one drops its imaginary part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn

from lightning_zeroplus.gradients.patches.specialize import generalize, specialize


def cast_real(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the real floating-point parameters and buffers of ``module`` in place, as ``Module.to()`` casts all.

    It keeps hooks, ``grad_dtype`` and ties, too.
    """
    return module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


class _CastsReal:
    """Mixin for Lightning's plugin of ``bf16-true`` and ``16-true``."""

    _desired_input_dtype: torch.dtype

    def convert_module(self, module: nn.Module) -> nn.Module:
        return cast_real(module, self._desired_input_dtype)


@contextmanager
def casting_real(plugin: Any) -> Iterator[None]:
    """Within: a precision plugin of Lightning's leaves complex tensors alone."""
    if not isinstance(plugin, HalfPrecision):
        yield
        return
    specialize(plugin, _CastsReal)
    try:
        yield
    finally:
        generalize(plugin, _CastsReal)
