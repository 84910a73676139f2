"""Tensor hooks of parameters whose gradients come from compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor


@contextmanager
def without_missing_gradients(params: Iterable[Tensor]) -> Iterator[None]:
    """Call the hooks of ``param.register_hook`` only with gradients, never with None, within a backward.

    A compiled graph hands its gradients to the engine and gives None to autograd, which calls the hooks once more with
    None. Hooks may not expect None, because without a compiler autograd calls no hook if there is no gradient.
    """
    wrapped: list[tuple[dict[int, Callable[[Tensor], Any]], int, Callable[[Tensor], Any]]] = []
    for param in params:
        hooks = param._backward_hooks or {}
        for handle, hook in list(hooks.items()):
            hooks[handle] = partial(_unless_missing, hook)
            wrapped.append((hooks, handle, hook))
    try:
        yield
    finally:
        for hooks, handle, hook in wrapped:
            if handle in hooks:  # else it was removed
                hooks[handle] = hook


def _unless_missing(hook: Callable[[Tensor], Any], grad: Tensor | None) -> Any:
    return None if grad is None else hook(grad)
