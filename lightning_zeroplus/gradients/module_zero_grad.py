"""``module.zero_grad()``, for gradients that are not kept in ``param.grad``."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class ModuleZeroGrad:
    """Replaces ``zero_grad`` of one module: drops the gradients kept elsewhere, then calls the class's method.

    A copy of the module, and an unpickled module, have the method of their class.

    Args:
        module: The module; only a weak reference is kept.
        drop: A bound method that drops every gradient since the last step; only a weak reference is kept.
    """

    def __init__(self, module: nn.Module, drop: Callable[[bool], None]) -> None:
        self._module = weakref.ref(module)
        self._drop = weakref.WeakMethod(drop)
        module.zero_grad = self  # type: ignore[method-assign]

    def __call__(self, set_to_none: bool = True) -> None:
        drop = self._drop()
        if drop is not None:
            drop(set_to_none)
        self._of_class()(set_to_none)

    def remove(self) -> None:
        """Restore the method of the module's class."""
        module = self._module()
        if module is not None and module.__dict__.get("zero_grad") is self:
            del module.zero_grad

    def _of_class(self) -> Any:
        module = self._module()
        assert module is not None, "the module calls this"
        return types.MethodType(type(module).zero_grad, module)

    def __reduce__(self) -> Any:
        return self._of_class().__reduce__()
