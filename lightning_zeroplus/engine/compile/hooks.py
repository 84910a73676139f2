"""Gradient hooks of parameters, while compiled graphs hand over the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor


@contextmanager
def without_missing_gradients(params: Iterable[Tensor]) -> Iterator[None]:
    """Around a backward: the hooks of ``param.register_hook`` are called with gradients only.

    A compiled graph hands a gradient over and gives autograd None in its place, with which autograd calls the hooks
    once more. Without a compiler a leaf that gets no gradient has no hook called, so they may not know what None is.
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
