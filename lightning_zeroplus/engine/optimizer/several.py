"""Several optimizers on one engine: each steps, clips and zeroes the gradients of its own parameters.

All gradients are accumulated and reduced together, as by DDP's reducer. A step of one optimizer sets the others'
averaged gradients aside, and puts them back afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from deepspeed import comm as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zeroplus.engine.optimizer.chain import ChainedOptimizer
from lightning_zeroplus.engine.optimizer.groups import take_over
from lightning_zeroplus.engine.optimizer.shown_states import ShowsStates, StatesOf
from lightning_zeroplus.engine.reduction.exchange import Piece
from lightning_zeroplus.engine.reduction.life import Event, Life
from lightning_zeroplus.gradients.again import evaluating
from lightning_zeroplus.gradients.patches.step_hooks import users_step_hooks

if TYPE_CHECKING:
    from lightning_zeroplus.engine.host import EngineHost
    from lightning_zeroplus.engine.reduction.local_sums import LocalSums
    from lightning_zeroplus.gradients.clip import Clip


class _Parted(NamedTuple):
    """What is kept while one of several optimizers steps.

    Attributes:
        part: Its number.
        others: The parameters whose averaged gradients are set aside.
        used: Others of which an earlier step has used a gradient.
        scale: The loss scale of what is set aside.
        kept: What is set aside.
        clips: What the others clip.
        norms: The norms of gradients of the others that were clipped already.
    """

    part: int
    others: set[int]
    used: set[int]
    scale: float
    kept: Any
    clips: dict[int, Clip]
    norms: dict[int | None, Tensor]


class StepsInParts:
    """The part of a gradient accumulation that knows which gradients belong to which optimizer.

    Attributes:
        clips: What to clip in the next step of each of several optimizers, by its number.
        norms_before_clipping: The norms of gradients that were clipped while they were shown, by number; None: by the
            only optimizer, or by all.
        norms: The gradient norm of the last step of each of several optimizers, by its number.
    """

    engine: EngineHost
    params: list[nn.Parameter]
    index: dict[int, int]
    averaged: set[int]
    used: set[int]
    life: Life
    local_sums: LocalSums
    clip: Clip | None

    def _begin_parts(self) -> None:
        self.clips: dict[int, Clip] = {}
        self.norms_before_clipping: dict[int | None, Tensor] = {}
        self.norms: dict[int, float | Tensor | None] = {}
        self._everything = frozenset(range(len(self.params)))
        self._in_several: dict[tuple[int, ...], frozenset[int]] = {}
        self._parted: _Parted | None = None
        self._members_of: dict[tuple[int, int], frozenset[int]] = {}

    @property
    def chain(self) -> ChainedOptimizer | None:
        """The user's optimizers, if there are several."""
        optimizer = self.torch_optimizer  # type: ignore[attr-defined]
        return optimizer if isinstance(optimizer, ChainedOptimizer) else None

    def members(self, part: int | None) -> frozenset[int]:
        """The indices of the parameters of one optimizer; of all parameters if ``part`` is None."""
        if part is None or self.chain is None:
            return self._everything
        links = self.chain.links[part]
        key = part, len(links)  # groups are added, and never removed
        if key not in self._members_of:
            assert self.engine.user_groups is not None
            groups = self.engine.user_groups.params
            mine = (param for indices in links for index in indices for param in groups[index])
            self._members_of[key] = frozenset(self.index[id(param)] for param in mine)
        return self._members_of[key]

    def shared(self) -> frozenset[int]:
        """The indices of the parameters that several optimizers update."""
        if self.chain is None or not self.chain.shares:
            return frozenset()
        key = tuple(map(len, self.chain.links))
        if key not in self._in_several:
            counts = Counter(index for part in range(len(self.chain.parts)) for index in self.members(part))
            self._in_several[key] = frozenset(index for index, count in counts.items() if count > 1)
        return self._in_several[key]

    def _stepped(self) -> frozenset[int]:
        """The parameters of the optimizer that steps."""
        return self.members(None if self.chain is None else self.chain.active)

    @contextmanager
    def alone(self, part: int | None) -> Iterator[bool]:
        """Leave only the gradients of one optimizer within.

        Args:
            part: The number of the optimizer; None: all.

        Yields:
            Whether the optimizer has any gradients; True if ``part`` is None.
        """
        if part is None or self.chain is None:
            yield True
            return
        self._part_from_others(part)
        try:
            with self.chain.only(part):
                is_there = bool(self.averaged)
                yield is_there
                if is_there and not self.averaged:  # it has stepped
                    self.norms[part] = self.grad_norm()  # type: ignore[attr-defined]
        finally:
            self._join_others()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within a step of one optimizer: all gradients are there, for a closure that runs another backward."""
        apart = self._parted
        self._join_others()
        yield
        if apart is not None:  # not after an exception: the ranks do not meet any more
            self._part_from_others(apart.part)

    def _part_from_others(self, part: int) -> None:
        """Leave only the gradients of one optimizer."""
        self.reduce_if_needed()  # type: ignore[attr-defined]
        self.clip_for_all(part)
        members = self.members(part)
        others, used = self.averaged - members, self.used - members
        scale = self.engine.loss_scale_factor()
        kept = self._set_aside(others)
        self._forget(others)
        self.averaged &= members
        self.clip = self.clips.pop(part, None)
        clips, norms = dict(self.clips), dict(self.norms_before_clipping)
        norms.pop(part, None)
        self._parted = _Parted(part, others, used, scale, kept, clips, norms)

    def clip_for_all(self, part: int | None) -> None:
        """Clip now, in order, if another optimizer clips gradients that this one uses, too: as under DDP."""
        members = self.members(part)
        if part is not None and any(n != part and not members.isdisjoint(self.members(n)) for n in self.clips):
            self.shown.gather()  # type: ignore[attr-defined]
            self.shown.put_back()  # type: ignore[attr-defined]

    def _join_others(self) -> None:
        """Undo :meth:`_part_from_others`."""
        apart, self._parted = self._parted, None
        if apart is None:
            return
        part, others, used, scale, kept, clips, norms = apart
        with torch.no_grad():
            # The step may have changed the loss scale, by a power of 2.
            self._put_back(kept, self.engine.loss_scale_factor() / scale)
        if self.averaged and self.clip is not None:
            clips[part] = self.clip  # it has not stepped
        self.clip = None
        self.averaged |= others
        self.used |= used
        self.clips |= clips
        self.norms_before_clipping |= norms
        self.life.goes_on(Event.SET if self.averaged else Event.DROPPED)

    def zero_part(self, part: int, set_to_none: bool) -> None:
        """Discard the gradients of one optimizer."""
        members = self.members(part)
        zeros = set() if set_to_none else self._have_gradients() & members  # type: ignore[attr-defined]
        self.shown.put_back()  # type: ignore[attr-defined]
        self.shown.zero(set_to_none, members)  # type: ignore[attr-defined]
        with torch.no_grad():
            self._forget(members)
        self.averaged -= members
        self.forget_synced(members)  # type: ignore[attr-defined]
        self.forget_used(members)  # type: ignore[attr-defined]
        self.clips.pop(part, None)
        if zeros:
            self._keep_zeros(zeros)  # type: ignore[attr-defined]

    # -- what families do differently ----------------------------------------------------------------------------------

    def _own(self, indices: Iterable[int]) -> list[Piece]:
        pieces: Sequence[Sequence[Piece]] = self._owned_pieces()  # type: ignore[attr-defined]
        own = pieces[dist.get_rank(group=self._process_group())]  # type: ignore[attr-defined]
        chosen = set(indices)
        return [piece for piece in own if piece.param in chosen]

    def _set_aside(self, indices: Iterable[int]) -> Any:
        """Copies of what this rank keeps of some parameters' averaged gradients."""
        return [(piece, self._slot(piece).clone()) for piece in self._own(indices)]  # type: ignore[attr-defined]

    def _put_back(self, kept: Any, factor: float) -> None:
        """Restore what :meth:`_set_aside` has copied, times ``factor``."""
        for piece, copied in kept:
            self._slot(piece).copy_(copied.mul_(factor) if factor != 1 else copied)  # type: ignore[attr-defined]

    def _forget(self, indices: Iterable[int]) -> None:
        """Drop this rank's gradients of some parameters, averaged or not."""
        for index in indices:
            self.local_sums.sums.pop(index, None)


class OneOfSeveral(ShowsStates, Optimizer):
    """One of several optimizers of an engine, as the user sees it.

    Args:
        engine: The engine; its torch optimizer is a :class:`.ChainedOptimizer`.
        number: The optimizer's number in the chain.
    """

    def __init__(self, engine: EngineHost, number: int) -> None:
        # Not Optimizer.__init__: groups and state come from the chain.
        self.engine = engine
        self.number = number
        self._optimizer_step_pre_hooks = self.optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = self.optimizer._optimizer_step_post_hooks

    @property
    def gradient_accumulation(self) -> Any:
        """The engine's gradient accumulation."""
        return self.engine.gradient_accumulation

    @property
    def optimizer(self) -> Any:
        """The torch optimizer."""
        return self.gradient_accumulation.chain.parts[self.number]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The torch optimizer's ``defaults``."""
        return self.optimizer.defaults

    def _states_of_parameters(self) -> StatesOf:
        params = [param for group in self.param_groups for param in group["params"]]
        return StatesOf(self.gradient_accumulation.states, params, self.number)

    def _shown_groups(self) -> Any:
        return self.param_groups

    @property
    def param_groups(self) -> Any:
        """The torch optimizer's groups, with the module's parameters. Others may be assigned."""
        chain, users = self.gradient_accumulation.chain, self.engine.user_groups
        assert users is not None
        return users.show(self.number, chain.groups_of_users(self.number, users.params))

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        take_over(self, value, self.number)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this optimizer's parameters.

        Args:
            closure: Run first, if given.

        Returns:
            What the closure returns.
        """
        with users_step_hooks(self.engine, self.number, self, closure):
            with torch.enable_grad():
                result = None if closure is None else closure()
            with evaluating(self.optimizer, result, closure):
                self.engine.step(part=self.number)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of this optimizer's parameters; other gradients stay.

        Args:
            set_to_none: If True, the next step leaves parameters alone that get no gradient. If False, those that had a
                gradient have a gradient of zero.
        """
        self.gradient_accumulation.zero_grad(set_to_none, self.number)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``; makes new partitions and keeps all states. A collective.

        Raises:
            RuntimeError: Within a window, or under ``compile``; nothing was changed.
            ValueError: If some parameters are in another group of this optimizer; nothing was changed.
        """
        self.engine.rebuild(param_group, self.number)

    def _state_dict_for_others(self) -> dict[str, Any]:
        # The strategy saves the states of all optimizers, by name of the parameter.
        return {"state": {}, "param_groups": []}

    def _load_for_others(self, given: Mapping[str, Any]) -> None:
        if given != self._state_dict_for_others():
            raise ValueError(
                f"A state was given to `{type(self).__name__}`, one of several optimizers. Their states are in the"
                " strategy's checkpoints: resume with `trainer.fit(ckpt_path=...)` or `fabric.load(...)`."
            )

    def __repr__(self) -> str:
        return repr(self.optimizer)


def shown(engine: EngineHost, number: int) -> OneOfSeveral:
    """One of several optimizers of an engine, by its number."""
    assert engine.gradient_accumulation is not None
    chain = engine.gradient_accumulation.chain
    assert chain is not None
    # Named like the user's class, because Lightning names logged learning rates after it.
    made = type(type(chain.parts[number]).__name__, (OneOfSeveral,), {})(engine, number)
    chain.handles.add(made)
    return made
