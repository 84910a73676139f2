"""Users' hooks that run after a gradient was accumulated, as under DDP: with all that ``param.grad`` has by then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_zeroplus.engine.reduction.life import Event, Life, Phase
from lightning_zeroplus.gradients.dtype import expected_grad_dtype
from lightning_zeroplus.gradients.ranks.agreement import Presence
from lightning_zeroplus.gradients.shown import read_plain

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lightning_zeroplus.engine.host import EngineHost
    from lightning_zeroplus.engine.reduction.local_sums import LocalSums


class RunsUsersHooks:
    """The part of a gradient accumulation that lets such hooks see and change the whole gradient.

    Elsewhere a backward brings what it computes to upstream's hook, and forgets it. Where a user has a hook, what came
    before lies in ``param.grad`` when autograd adds to it, and upstream's hook is the last one.

    A hook may be on one rank only, and all ranks take part in collectives for it. In a Trainer they agree when a
    fit begins, and between batches; elsewhere all ranks are taken to have the same hooks.
    """

    engine: EngineHost
    params: list[nn.Parameter]
    local_sums: LocalSums
    averaged: set[int]
    life: Life
    whole_gradients: Callable[[], dict[int, Tensor]]
    take_back: Callable[[dict[int, Tensor]], None]
    reduce_if_needed: Callable[[], None]
    set_local: Callable[[int, Tensor | None], None]
    full_shape: Callable[[nn.Parameter], AbstractContextManager[None]]
    _keys: Mapping[int, int] = {}
    _own_hooks: AbstractSet[int] = frozenset()
    _with_hooks: AbstractSet[int] = frozenset()
    _shared_hooks: AbstractSet[int] | None = None

    def _begin_hooks(self, upstreams: Iterable[RemovableHandle]) -> None:
        """Find the hooks that users have set before.

        Args:
            upstreams: The handles of upstream's hooks; none if upstream's hooks do nothing.
        """
        self._own_hooks = self._with_hooks = frozenset()
        self._keys = {id(handle.hooks_dict_ref()): handle.id for handle in upstreams}
        for index in range(len(self.params)):
            self.users_hook(index)

    def users_hook(self, index: int) -> None:
        """A user may have set such a hook: upstream's stays the last."""
        hooks: Any = self.params[index]._post_accumulate_grad_hooks
        if not hooks:
            return
        own = self._keys.get(id(hooks))
        if own in hooks:
            hooks[own] = hooks.pop(own)  # torch goes by the dict, and not by what `move_to_end()` changes
        if len(hooks) > (own in hooks):
            self._own_hooks |= {index}
            self._with_hooks |= {index}

    def has_users_hooks(self) -> bool:
        """Whether some parameter has such a hook on this rank."""
        for index in list(self._own_hooks):
            hooks: Any = self.params[index]._post_accumulate_grad_hooks
            if len(hooks) <= (self._keys.get(id(hooks)) in hooks):
                self._own_hooks -= {index}  # it was removed
        return bool(self._own_hooks)

    def has_unshared_hooks(self) -> bool:
        """Whether there is one that the other ranks do not know."""
        return self.has_users_hooks() and not self._own_hooks <= (self._shared_hooks or frozenset())

    @property
    def awaited_hooks(self) -> AbstractSet[int]:
        """The parameters that have such hooks on some rank, as far as all ranks know."""
        if self._shared_hooks is None and not self.has_users_hooks():
            self._with_hooks = frozenset()
        return self._own_hooks if self._shared_hooks is None else self._shared_hooks

    @property
    def takes_averages_for_hooks(self) -> bool:
        """Whether they need what was averaged."""
        return bool(self._with_hooks and self.awaited_hooks)

    def share_users_hooks(self) -> None:
        """Agree on the parameters with such hooks. All ranks call it."""
        members = range(len(self.params))
        self._shared_hooks = Presence(members, self._own_hooks, torch.device("cpu"), self.engine.hosts).result()
        self._with_hooks = self._own_hooks | self._shared_hooks

    def _take_averages_for_hooks(self, was_held: bool) -> None:
        """Before a backward: what was averaged before is this rank's own again, for the hooks. A collective then.

        Args:
            was_held: The backward before was not to reduce: the hooks see what this rank has accumulated.
        """
        if was_held or self.life.phase is Phase.EMPTY or not self.takes_averages_for_hooks:
            return
        self.reduce_if_needed()
        there = {index for index in self.awaited_hooks & self.averaged if read_plain(self.params[index]) is None}
        if not there:
            return
        whole = self.whole_gradients()
        mine = {index: whole.pop(index) for index in there & whole.keys()}
        self.take_back(whole)
        with self.local_sums.held():
            for index, grad in mine.items():
                self.set_local(index, grad)
        self.life.goes_on(Event.WAITS)

    def _lay_for_hooks(self, index: int) -> None:
        """Right before autograd adds to ``param.grad``: it has what came before."""
        with self.full_shape(self.params[index]):
            self.local_sums.lay_in_grad(index, self.params[index])

    def _fill_for_hooks(self, param: Any) -> None:
        """After the hooks: a gradient that they have dropped is zero, which is what DDP's reduction makes of it."""
        if read_plain(param) is None:
            dtype, shape = expected_grad_dtype(param) or param.dtype, getattr(param, "ds_shape", param.shape)
            with self.full_shape(param):
                param.grad = torch.zeros(shape, dtype=dtype, device=param.device)
