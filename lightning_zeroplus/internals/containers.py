"""Tensors in containers and objects that a module takes, writes to, and returns.

DeepSpeed and FSDP2 look for tensors in tuples, lists and dicts. They give a module copies of the lists, or of all
containers, that it was called with. What the module writes to them is lost then, and weights that a backward needs are
not gathered for what it returns in other objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_NO_CONTAINERS = (
    Tensor, nn.Module, str, bytes, int, float, complex, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType,
    torch.dtype, torch.device, torch.Generator, type(None),
)  # fmt: skip
#: How deep objects are looked into, which may be large.
_DEPTH = 4


def is_object(value: Any) -> bool:
    """Whether this is an object with attributes, which may be tensors."""
    return not isinstance(value, (*_NO_CONTAINERS, dict, list, tuple)) and hasattr(value, "__dict__")


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors in containers and objects."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        for each in _items(value):
            yield from tensors_in(each, depth - 1)


def hidden_tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in objects, which are no tuples, lists or dicts, anywhere in an output."""
    if is_object(output):
        yield from tensors_in(output)
    elif isinstance(output, dict | list | tuple):
        for each in _items(output):
            if not isinstance(each, Tensor):
                yield from hidden_tensors(each)


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    return list(vars(value).values()) if is_object(value) else []


class _Given(NamedTuple):
    """A container that a module is called with.

    Attributes:
        users: The caller's.
        modules: What the module has in its place, perhaps the same.
        before: What it had before the call.
        originals: By ``id`` of what it had, what the caller's has in its place.
    """

    users: Any
    modules: Any
    before: Any
    originals: dict[int, Any]


class GivenContainers:
    """The containers among the arguments of a call, into which the module may write.

    Args:
        users: The arguments of the caller.
        modules: Those that the module gets.
    """

    def __init__(self, users: Any, modules: Any) -> None:
        self._given: list[_Given] = []
        self._note(users, modules, 2 + _DEPTH)  # within the tuples of arguments

    def _note(self, users: Any, modules: Any, depth: int) -> None:
        if isinstance(users, _NO_CONTAINERS) or not depth:
            return
        pairs = list(zip(_items(users), _items(modules), strict=False))
        if isinstance(users, dict | list) or is_object(users):
            before = list(modules) if isinstance(users, list) else dict(_entries(modules))
            self._given.append(_Given(users, modules, before, {id(copy): own for own, copy in pairs}))
        for own, copy in pairs:
            self._note(own, copy, depth - 1)

    def follow(self) -> list[Tensor]:
        """After the call: let the caller's containers have what the module has written to its copies.

        Returns:
            The tensors that it has written.
        """
        written: list[Any] = []
        for users, modules, before, originals in self._given:
            if isinstance(before, list):
                known = set(map(id, before))
                written += [each for each in modules if id(each) not in known]
                if users is not modules and list(map(id, modules)) != list(map(id, before)):
                    users[:] = [originals.get(id(each), each) for each in modules]
                continue
            now = _entries(modules)
            changed = {key: each for key, each in now.items() if key not in before or before[key] is not each}
            written += changed.values()
            if users is not modules:
                _entries(users).update({key: originals.get(id(each), each) for key, each in changed.items()})
                for key in before.keys() - now.keys():
                    _entries(users).pop(key, None)
        return [tensor for each in written for tensor in tensors_in(each)]


class Calls:
    """The calls of a module with containers that have not ended: it may call itself, and a call may raise."""

    def __init__(self) -> None:
        self._open: list[tuple[Any, GivenContainers]] = []

    def begin(self, users: tuple[Any, dict[str, Any]], modules: tuple[Any, dict[str, Any]]) -> None:
        """A call begins.

        Args:
            users: The caller's positional and named arguments.
            modules: Those that the module gets.
        """
        found = given_containers(users, modules)
        if found is not None:
            self._open.append((modules[0], found))

    def end(self, args: Any) -> list[Tensor]:
        """The call with these positional arguments has ended: follow what it has written.

        Returns:
            The tensors that it has written to containers.
        """
        for at in reversed(range(len(self._open))):
            given, found = self._open[at]
            if _are_same(given, args):
                del self._open[at:]
                return found.follow()
        return []


def _are_same(given: Any, args: Any) -> bool:
    """Whether these are the arguments of one call, of which a hook of the user's may have changed some."""
    if given is args:
        return True
    containers = {id(each) for each in given if not isinstance(each, _NO_CONTAINERS)}
    return any(id(each) in containers for each in args)


def given_containers(users: tuple[Any, dict[str, Any]], modules: tuple[Any, dict[str, Any]]) -> GivenContainers | None:
    """The containers among the arguments of a call, or None, which is quickly found out.

    Args:
        users: The caller's positional and named arguments.
        modules: Those that the module gets.
    """
    if all(isinstance(each, _NO_CONTAINERS) for each in (*users[0], *users[1].values())):
        return None
    found = GivenContainers((users[0], tuple(users[1].values())), (modules[0], tuple(modules[1].values())))
    return found if found._given else None


def _entries(container: Any) -> dict[Any, Any]:
    return container if isinstance(container, dict) else vars(container)
