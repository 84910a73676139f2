"""Groups of a torch optimizer where nothing is partitioned: the user has the optimizer itself, and may edit them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zeroplus.engine.optimizer.kept import KeepsUsed
from lightning_zeroplus.engine.reduction.life import Event
from lightning_zeroplus.engine.reduction.local_sums import LocalSums
from lightning_zeroplus.gradients.shown import read_plain


class FollowsGroups(KeepsUsed):
    """The part of a gradient accumulation that follows them: who is optimized, and who is not any longer.

    Gradients of parameters that no optimizer has are averaged when they are looked at, and have no loss scale. So
    those that come, or go, are averaged at once, and get the scale, or lose it.

    Attributes:
        trained: The parameters that are optimized, with their indices.
    """

    #: Whether the groups are the user's own.
    has_users_groups = True
    optimizer: Any
    index: dict[int, int]
    optimized: frozenset[int]
    local_sums: LocalSums
    average_outside: Callable[..., None]
    outside_was_seen: bool
    _optimized_params: Callable[[], Iterable[nn.Parameter]]
    _make_averaged: Callable[[], None]
    _members: set[int]

    def _begin_following(self) -> None:
        self.trained = [(index, self.params[index]) for index in sorted(self.optimized)]
        self._in_groups = list(self._optimized_params()) if self.has_users_groups else []

    def adopt_groups(self) -> None:
        """Look whether parameters have come, or gone. A collective then, but in a window."""
        if not self.has_users_groups:
            return
        now = list(self._optimized_params())
        if len(now) == len(self._in_groups) and all(map(is_, now, self._in_groups)):
            return
        self.shown.put_back()
        if not self.local_sums.holding:
            self._make_averaged()
            self.average_outside(False)
        before = self.optimized
        self.optimized = frozenset(self.index[id(param)] for param in now if id(param) in self.index)
        self._begin_following()
        come = {index for index in self.optimized - before if self._rescale(index, self.engine.loss_scale_factor())}
        for index in before - self.optimized:
            self._rescale(index, 1 / self.engine.loss_scale_factor())
        self._members &= self.optimized
        self.averaged &= self.optimized
        self.forget_used(before - self.optimized)
        self.outside_was_seen |= self.shown.kept is not None
        self.shown.forget(before - self.optimized)
        if come:
            self.averaged |= come
            self.life.goes_on(Event.SET)

    def _rescale(self, index: int, factor: float) -> bool:
        """Whether there is a gradient."""
        grad: Tensor | None = read_plain(self.params[index])
        if grad is not None and factor != 1.0:
            with torch.no_grad():
                grad.mul_(factor)
        return grad is not None
