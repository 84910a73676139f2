"""Upstream calls a torch optimizer's ``step()`` several times in one update: for each group, or part of a group.

Optimizers that count their steps in groups, or in attributes of their own, would count each call. So a call sees the
groups with parameters, and begins with the numbers from before the update.

Others know a group by its position, as AdaBound, which keeps the first learning rate of each group in a list. For those
that were given to :func:`show_all_groups` the other groups are in their places, without parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

from torch import Tensor

#: The modules of optimizers that count by parameter, and whose rules are known.
UPSTREAM = ("torch.optim.", "deepspeed.")
_see_all: WeakSet[Any] = WeakSet()


def show_all_groups(optimizer: Any) -> None:
    """Let each call see all groups in their places, of which the others have no parameters.

    Args:
        optimizer: A torch optimizer.
    """
    _see_all.add(optimizer)


@contextmanager
def as_one_step(optimizers: Iterable[Any]) -> Iterator[None]:
    """Wrap an update.

    Args:
        optimizers: The torch optimizers.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            if optimizer is not None and not type(optimizer).__module__.startswith(UPSTREAM):
                calls = _Calls(optimizer)
                stack.callback(calls.leave, optimizer)
                stack.callback(optimizer.register_step_pre_hook(calls.begin).remove)
                stack.callback(optimizer.register_step_post_hook(calls.end).remove)
        yield


class _Calls:
    def __init__(self, optimizer: Any) -> None:
        self._own = _Before(vars(optimizer))
        self._all = list(optimizer.param_groups) if optimizer in _see_all else []
        self._of_groups = {id(group): _Before(group) for group in optimizer.param_groups}
        self._is_first = True
        self._groups: Any = None
        self._depth = 0

    def begin(self, optimizer: Any, *unused: Any) -> None:
        """Let the call see the groups that have parameters, with the numbers from before the first call."""
        self._depth += 1
        if self._depth > 1:
            return  # the `step` of a subclass calls its parent's, which may have the hooks as well
        self._groups = optimizer.param_groups
        stepped = [group for group in self._groups if group["params"]]
        optimizer.param_groups = self._in_places(stepped) if self._all else stepped
        if not self._is_first:
            self._own.restore(vars(optimizer))
            for group in stepped:
                if id(group) in self._of_groups:
                    self._of_groups[id(group)].restore(group)
        self._is_first = False

    def _in_places(self, stepped: list[Any]) -> list[Any]:
        """All groups, of which those that are not stepped are copies, as they were before the update."""
        ids = set(map(id, stepped))
        return [group if id(group) in ids else self._of_groups[id(group)].emptied(group) for group in self._all]

    def end(self, optimizer: Any, *unused: Any) -> None:
        """After the call: the groups are all there again."""
        self._depth -= 1
        if self._depth == 0:
            self.leave(optimizer)

    def leave(self, optimizer: Any) -> None:
        """After the update, also where a step has raised."""
        self._depth = 0
        if self._groups is not None:
            optimizer.param_groups, self._groups = self._groups, None


class _Before:
    """Numbers, also in tensors, and not flags: those say what the first call has done for all."""

    def __init__(self, owner: MutableMapping[str, Any]) -> None:
        self._values = {
            key: value.detach().clone() if isinstance(value, Tensor) else value
            for key, value in owner.items()
            if value is None or _is_number(value)
        }
        self._keys = frozenset(owner)

    def emptied(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a group without parameters, with the numbers from before."""
        numbers = {key: each.clone() if isinstance(each, Tensor) else each for key, each in self._values.items()}
        return {**{key: group[key] for key in group if key in self._keys}, **numbers, "params": []}

    def restore(self, owner: MutableMapping[str, Any]) -> None:
        """Restore them, and remove those that the first call has made."""
        for key, value in list(owner.items()):
            if not _is_number(value):
                continue
            if key not in self._keys:
                del owner[key]
            elif key in self._values and isinstance(value, Tensor) and isinstance(self._values[key], Tensor):
                value.detach().copy_(self._values[key])
            elif key in self._values:
                owner[key] = self._values[key]


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, Tensor) and value.numel() == 1
    return is_one or (isinstance(value, int | float) and not isinstance(value, bool))
