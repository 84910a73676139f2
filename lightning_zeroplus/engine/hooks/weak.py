"""Hooks of parameters that do not keep their engine alive.

Python's garbage collector does not see what torch keeps in C++: a hook of ``register_post_accumulate_grad_hook``, or
any hook of a parameter whose accumulation node is kept. An engine that such a hook has would live as long as the
process, with module and optimizer. A Trainer closes its engine; in Fabric, engines are only dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class WeakHooks:
    """Keeps hooks for an owner, and removes them when it is gone.

    Args:
        owner: Whose hooks they are. It must keep this object.
    """

    def __init__(self, owner: Any) -> None:
        self._hooks: list[Callable[..., Any]] = []
        self._handles: list[RemovableHandle] = []
        weakref.finalize(owner, _remove, self._handles).atexit = False

    def weak(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook for torch: it is called as long as the owner lives, and does not keep the owner."""
        self._hooks.append(hook)
        return weakref.proxy(hook)

    def add(self, handle: RemovableHandle) -> None:
        """Note the handle of a hook that this object keeps."""
        self._handles.append(handle)

    def remove(self) -> None:
        """Remove the hooks."""
        _remove(self._handles)
        self._hooks.clear()


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def without_graphs(params: Iterable[Any]) -> None:
    """Let upstream's notes on parameters be no part of a graph: a graph keeps its leaves, unseen as well.

    Upstream flattens each parameter to note where its master weights are.

    Args:
        params: Parameters of upstream's stages 1 and 2.
    """
    for param in params:
        fragment = getattr(param, "_hp_mapping", None)  # None: other ranks own it
        if fragment is not None:
            fragment.lp_fragment, fragment.hp_fragment = fragment.lp_fragment.detach(), fragment.hp_fragment.detach()
