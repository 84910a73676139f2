"""The engine's hooks on parameters, which do not keep the engine alive, and need not be called in every backward.

Python's garbage collector does not see what torch keeps in C++: a hook of ``register_post_accumulate_grad_hook``, or
any hook of a parameter whose accumulation node is kept. An engine that such a hook has would live as long as the
process, with module and optimizer. A Trainer closes its engine; in Fabric, engines are only dropped.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import setitem
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

_Hooks = dict[int, Callable[..., Any]]
#: Takes an argument and does nothing, without a call of Python code.
_nothing: Callable[[Any], None] = deque[Any](maxlen=0).append
#: Exhausts an iterator, without a step of Python code for each item.
_exhaust: Callable[[Iterable[Any]], Any] = deque[Any](maxlen=0).extend


class _Resting(NamedTuple):
    """For each hook that may rest: the dict of hooks that it is in, its key there, and the hook."""

    dicts: list[_Hooks]
    keys: list[int]
    hooks: list[Callable[..., Any]]


class ParameterHooks:
    """The hooks of an engine on parameters. They are removed when their owner is gone.

    Args:
        owner: Whose hooks they are. It must keep this object.
    """

    def __init__(self, owner: Any) -> None:
        self._kept: list[Callable[..., Any]] = []
        self._handles: list[RemovableHandle] = []
        self._others: list[tuple[_Hooks, int, Callable[..., Any]]] = []
        self._resting = _Resting([], [], [])
        self._rest = False
        weakref.finalize(owner, _remove, self._handles).atexit = False

    def register(self, param: Tensor, hook: Callable[..., Any], rests: bool) -> None:
        """Register a hook by ``param.register_hook``.

        Args:
            param: The parameter.
            hook: The hook.
            rests: Whether :meth:`rest` applies to it.
        """
        self._put(param.register_hook(_nothing), hook, rests)

    def replace(self, handle: RemovableHandle, hook: Callable[..., Any], rests: bool) -> None:
        """Put a hook in the place of another one, until :meth:`remove`.

        Args:
            handle: That of the other one.
            hook: The hook.
            rests: Whether :meth:`rest` applies to it.
        """
        hooks: Any = handle.hooks_dict_ref()
        self._others.append((hooks, handle.id, hooks[handle.id]))
        self._put(handle, hook, rests)

    def _put(self, handle: RemovableHandle, hook: Callable[..., Any], rests: bool) -> None:
        hooks: Any = handle.hooks_dict_ref()
        self._kept.append(hook)
        weak: Callable[..., Any] = weakref.proxy(hook)
        hooks[handle.id] = weak
        self._handles.append(handle)
        if rests:
            self._resting.dicts.append(hooks)
            self._resting.keys.append(handle.id)
            self._resting.hooks.append(weak)

    def rest(self) -> None:
        """Until :meth:`wake`, do nothing when such a hook is called, in little time."""
        self._rest = True
        _exhaust(map(setitem, self._resting.dicts, self._resting.keys, repeat(_nothing)))

    def wake(self) -> None:
        """End :meth:`rest`. May be called at any time."""
        if self._rest:
            self._rest = False
            _exhaust(map(setitem, *self._resting))

    def remove(self) -> None:
        """Remove the hooks, and give those that were replaced their place back."""
        self._rest = False
        _remove(self._handles)
        for hooks, key, other in self._others:
            hooks[key] = other
        for each in (self._kept, self._others, *self._resting):
            each.clear()


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
