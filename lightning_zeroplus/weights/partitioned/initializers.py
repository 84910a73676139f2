"""``torch.nn.init`` on partitioned parameters: gather, initialize on all ranks, and partition rank 0's values."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import nn

from lightning_zeroplus.weights.gathered import collectively
from lightning_zeroplus.weights.partitioned.partition import is_partitioned

_modules: WeakSet[nn.Module] = WeakSet()
_originals: dict[str, Callable[..., Any]] = {}


def install(module: nn.Module) -> None:
    """Give the functions of ``torch.nn.init`` whole parameters.

    The functions are replaced in ``torch.nn.init`` as long as a module is installed.
    """
    if module not in _modules:
        _modules.add(module)
        finalize(module, _restore_unless_needed)
    if not _originals:
        for name in torch.nn.init.__all__:
            if name.endswith("_"):
                _originals[name] = getattr(torch.nn.init, name)
                setattr(torch.nn.init, name, _gathering(_originals[name]))


def remove(module: nn.Module) -> None:
    """Undo :func:`install`."""
    _modules.discard(module)
    _restore_unless_needed()


def _restore_unless_needed() -> None:
    if not any(True for _ in _modules):  # iterates over live modules only
        for name, function in _originals.items():
            setattr(torch.nn.init, name, function)
        _originals.clear()


def _gathering(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def on_whole(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs.get("tensor")
        if not is_partitioned(tensor):
            return function(*args, **kwargs)
        return collectively(tensor, lambda: function(*args, **kwargs))

    return on_whole
