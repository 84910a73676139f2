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
from operator import is_, setitem
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch import Tensor

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

    def rest(self) -> None:
        _exhaust(map(setitem, self.dicts, self.keys, repeat(_nothing)))

    def wake(self) -> None:
        _exhaust(map(setitem, *self))


_NAME = "_backward_hooks"


class ParameterHooks:
    """The hooks of an engine on parameters. They are removed when their owner is gone.

    Args:
        owner: Whose hooks they are. It must keep this object.
    """

    def __init__(self, owner: Any) -> None:
        self._kept: list[Callable[..., Any]] = []
        self._handles: list[RemovableHandle] = []
        self._others: list[tuple[_Hooks, int, Callable[..., Any]]] = []
        #: Hooks of ``param.register_hook``, and their parameters.
        self._resting = _Resting([], [], [])
        self._params: list[Tensor] = []
        self._replaced = _Resting([], [], [])
        self._rest = self._are_away = False
        weakref.finalize(owner, _remove, self._handles).atexit = False

    def register(self, param: Tensor, hook: Callable[..., Any], rests: bool) -> None:
        """Register a hook by ``param.register_hook``.

        Args:
            param: The parameter.
            hook: The hook.
            rests: Whether :meth:`rest` applies to it.
        """
        handle = param.register_hook(_nothing)
        weak = self._put(handle, hook)
        if rests:
            self._params.append(param)
            _add(self._resting, handle, weak)

    def replace(self, handle: RemovableHandle, hook: Callable[..., Any], rests: bool) -> None:
        """Put a hook in the place of another one, until :meth:`remove`.

        Args:
            handle: That of the other one.
            hook: The hook.
            rests: Whether :meth:`rest` applies to it.
        """
        hooks: Any = handle.hooks_dict_ref()
        self._others.append((hooks, handle.id, hooks[handle.id]))
        weak = self._put(handle, hook)
        if rests:
            _add(self._replaced, handle, weak)

    def _put(self, handle: RemovableHandle, hook: Callable[..., Any]) -> Callable[..., Any]:
        hooks: Any = handle.hooks_dict_ref()
        self._kept.append(hook)
        weak: Callable[..., Any] = weakref.proxy(hook)
        hooks[handle.id] = weak
        self._handles.append(handle)
        return weak

    def rest(self) -> None:
        """Until :meth:`wake`, do nothing when such a hook is called, in little time.

        Tensor hooks are taken away for that time, where there are no others: torch would ask for Python's lock to call
        one that does nothing.
        """
        self._rest = True
        self._are_away = self._are_alone()
        if self._are_away:
            _exhaust(map(setattr, self._params, repeat(_NAME), repeat(None)))
        else:
            self._resting.rest()
        self._replaced.rest()

    def _are_alone(self) -> bool:
        dicts = self._resting.dicts
        return max(map(len, dicts), default=0) == 1 and all(map(is_, self._tensor_hooks(), dicts))

    def _tensor_hooks(self) -> Iterable[_Hooks | None]:
        return map(getattr, self._params, repeat(_NAME))

    def wake(self) -> None:
        """End :meth:`rest`. May be called at any time."""
        if not self._rest:
            return
        self._rest = False
        if self._are_away:
            self._are_away = False
            if any(self._tensor_hooks()):
                self._join_others()
            _exhaust(map(setattr, self._params, repeat(_NAME), self._resting.dicts))
        else:
            self._resting.wake()
        self._replaced.wake()

    def _join_others(self) -> None:
        """Put each hook before those that were registered in the meantime, whose handles know their own dict."""
        for index, others in enumerate(list(self._tensor_hooks())):
            if others:
                handle = RemovableHandle(others)
                theirs = dict(others)
                others.clear()
                others.update({handle.id: self._resting.hooks[index], **theirs})
                self._handles.append(handle)
                self._resting.dicts[index], self._resting.keys[index] = others, handle.id

    def remove(self) -> None:
        """Remove the hooks, and give those that were replaced their place back."""
        self.wake()
        _remove(self._handles)
        for hooks, key, other in self._others:
            hooks[key] = other
        for each in (self._kept, self._others, self._params, *self._resting, *self._replaced):
            each.clear()


def _add(resting: _Resting, handle: RemovableHandle, hook: Callable[..., Any]) -> None:
    hooks: Any = handle.hooks_dict_ref()
    resting.dicts.append(hooks)
    resting.keys.append(handle.id)
    resting.hooks.append(hook)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
