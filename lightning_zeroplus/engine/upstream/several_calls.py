"""Upstream calls a torch optimizer's ``step()`` several times in one update: for each group, or part of a group.

At stage 3 each call sees all groups. Optimizers that count their steps in groups, or in attributes of their own, would
count each call. So each call begins with the numbers from before the update.
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
    with ExitStack() as hooks:
        for optimizer in optimizers:
            if optimizer is not None and not type(optimizer).__module__.startswith(_UPSTREAM):
                hooks.callback(optimizer.register_step_pre_hook(_Numbers(optimizer).begin_again).remove)
        yield


class _Numbers:
    def __init__(self, optimizer: Any) -> None:
        self._own = _numbers(vars(optimizer))
        self._of_groups = {id(group): _numbers(group) for group in optimizer.param_groups}
        self._is_first = True

    def begin_again(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Before each call but the first, give those groups that it sees their numbers again."""
        if not self._is_first:
            _restore(vars(optimizer), self._own)
            for group in optimizer.param_groups:
                if id(group) in self._of_groups:
                    _restore(group, self._of_groups[id(group)])
        self._is_first = False


def _numbers(owner: MutableMapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in owner.items() if isinstance(value, int | float)}
    tensors = {key: value for key, value in owner.items() if isinstance(value, Tensor) and value.numel() == 1}
    return found | {key: value.detach().clone() for key, value in tensors.items()}


def _restore(owner: MutableMapping[str, Any], numbers: dict[str, Any]) -> None:
    for key, value in owner.items():
        if key not in numbers:
            continue
        if isinstance(value, Tensor):
            value.detach().copy_(numbers[key])
        else:
            owner[key] = numbers[key]
    for key in [key for key, value in owner.items() if isinstance(value, int | float) and key not in numbers]:
        del owner[key]  # as it was: the first call has made it
