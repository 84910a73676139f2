"""Upstream calls a torch optimizer's ``step()`` several times in one update: for each group, or part of a group.

At stage 3 each call sees all groups, of which one has parameters. Optimizers that count their steps in groups, or in
attributes of their own, would count each call. So a call sees the groups with parameters, and begins with the numbers
from before the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

_UPSTREAM = ("torch.optim.", "deepspeed.")  # these count by parameter


@contextmanager
def as_one_step(optimizers: Iterable[Any]) -> Iterator[None]:
    """Wrap an update.

    Args:
        optimizers: The torch optimizers.
    """
    with ExitStack() as stack:
        for optimizer in optimizers:
            if optimizer is not None and not type(optimizer).__module__.startswith(_UPSTREAM):
                calls = _Calls(optimizer)
                stack.callback(calls.end, optimizer)
                stack.callback(optimizer.register_step_pre_hook(calls.begin).remove)
                stack.callback(optimizer.register_step_post_hook(calls.end).remove)
        yield


class _Calls:
    def __init__(self, optimizer: Any) -> None:
        self._own = _Before(vars(optimizer))
        self._of_groups = {id(group): _Before(group) for group in optimizer.param_groups}
        self._is_first = True
        self._groups: Any = None

    def begin(self, optimizer: Any, *unused: Any) -> None:
        """Let the call see the groups that have parameters, with the numbers from before the first call."""
        self._groups = optimizer.param_groups
        optimizer.param_groups = [group for group in self._groups if group["params"]]
        if not self._is_first:
            self._own.restore(vars(optimizer))
            for group in optimizer.param_groups:
                if id(group) in self._of_groups:
                    self._of_groups[id(group)].restore(group)
        self._is_first = False

    def end(self, optimizer: Any, *unused: Any) -> None:
        """After the call, or a step that raises: the groups are all there again."""
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
