"""``module.zero_grad()``, for gradients that ``param.grad`` does not have."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class ModuleZeroGrad:
    """Stands in for the ``zero_grad`` of one module: drops what is accumulated elsewhere, then does what that does.

    A copy of the module, and a module that is unpickled, have their class's method.

    Args:
        module: The module; it does not keep the owner of ``drop`` alive.
        drop: A bound method that drops every gradient since the last step.
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
        """Give the module its own method back."""
        module = self._module()
        if module is not None and module.__dict__.get("zero_grad") is self:
            del module.zero_grad

    def _of_class(self) -> Any:
        module = self._module()
        assert module is not None, "the module calls this"
        return types.MethodType(type(module).zero_grad, module)

    def __reduce__(self) -> Any:
        return self._of_class().__reduce__()
