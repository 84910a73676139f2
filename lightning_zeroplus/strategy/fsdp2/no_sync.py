"""``trainer.model.no_sync()``: under DDP, ``trainer.model`` is a wrapper that has it; here it is the module."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


class ModuleNoSync:
    """Gives one module a ``no_sync()``, unless it has one. A copy of the module has one that does nothing.

    Args:
        module: The module; only a weak reference is kept.
        hold: A bound method; within the context that it returns, backwards only accumulate. Only a weak reference is
            kept.
    """

    def __init__(self, module: nn.Module, hold: Callable[[], AbstractContextManager[None]]) -> None:
        self._module = weakref.ref(module)
        self._hold = weakref.WeakMethod(hold)
        if not hasattr(module, "no_sync"):
            module.no_sync = self  # type: ignore[assignment]

    def __call__(self) -> AbstractContextManager[None]:
        """Only accumulate within, as under DDP."""
        hold = self._hold()
        return nullcontext() if hold is None else hold()

    def remove(self) -> None:
        """Take it from the module."""
        module = self._module()
        if module is not None and vars(module).get("no_sync") is self:
            del module.no_sync

    def __reduce__(self) -> Any:
        return _of_a_copy, ()


def _of_a_copy() -> Callable[[], AbstractContextManager[None]]:
    return nullcontext
