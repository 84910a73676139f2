"""``zero_grad()`` and ``step()`` of the optimizer that the user sees, and of the torch optimizers within."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_zeroplus.engine.families.norms import ReadsGradientsOnce
from lightning_zeroplus.engine.optimizer.groups import ShowsGroups, own_methods, unwrapped
from lightning_zeroplus.engine.optimizer.several import shown
from lightning_zeroplus.engine.optimizer.shown_states import ShowsStates
from lightning_zeroplus.engine.reduction.life import Event, Life
from lightning_zeroplus.engine.scaling import UpdatesScaleLate
from lightning_zeroplus.engine.upstream.hook_counts import CountsNoHooks
from lightning_zeroplus.gradients.again import evaluating
from lightning_zeroplus.gradients.patches.step_hooks import users_step_hooks
from lightning_zeroplus.gradients.shown import ShownGradients, write_plain

if TYPE_CHECKING:
    from lightning_zeroplus.engine.host import EngineHost
    from lightning_zeroplus.engine.reduction.local_sums import Guard


class RoutedZeroGrad:
    """Mixin for the optimizer that the user sees: ``zero_grad()`` discards every gradient since the last step.

    ``step()`` lets the engine step, which reduces gradients first. Lightning's wrapper does so by the strategy; but the
    user may have the optimizer itself, from ``self.optimizers(use_pl_optimizer=False)`` or a scaler of losses.

    Lightning's ``LightningOptimizer`` inherits the *class* of the optimizer it wraps. So ``zero_grad`` runs with the
    wrapper as ``self``, and upstream's bookkeeping would land on the wrapper. Attribute look-up does reach the wrapped
    optimizer, and so its accumulation, a :class:`ZeroesGradients`.
    """

    gradient_accumulation: ZeroesGradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the accumulated gradients.

        Args:
            set_to_none: If True, the next step leaves parameters alone that get no gradient. If False, those that had a
                gradient have a gradient of zero.
        """
        optimizer = unwrapped(self)
        if optimizer is self:
            self.gradient_accumulation.zero_grad(set_to_none)
        else:
            optimizer.zero_grad(set_to_none)  # it may have become one of several

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: Run first, if given.

        Returns:
            What the closure returns.
        """
        engine = self.gradient_accumulation.engine
        if engine.updating:
            return self._step_within(closure)
        return stepped_by(engine, self, closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch calls the user's hooks in its own step

    def _step_within(self, closure: Callable[[], Any] | None) -> Any:
        step = super().step  # type: ignore[misc]
        return step() if closure is None else step(closure)


class ZeroOverrides(CountsNoHooks, RoutedZeroGrad, UpdatesScaleLate, ShowsGroups, ShowsStates, ReadsGradientsOnce):
    """What is overridden of both of upstream's optimizers that partition: those of stages 1 and 2, and of stage 3."""


def stepped_by(engine: Any, optimizer: Any, closure: Callable[[], Any] | None, part: int | None = None) -> Any:
    """Run the closure, and let the engine step.

    Args:
        engine: The engine.
        optimizer: The torch optimizer, or upstream's around it.
        closure: Of ``optimizer.step()``.
        part: The number of the optimizer, where there are several.

    Returns:
        What the closure returns.
    """
    users = engine.optimizer if part is None else shown(engine, part)
    with users_step_hooks(engine, part, users, closure):
        with torch.enable_grad():
            result = None if closure is None else closure()
        with evaluating(optimizer, result, closure):
            engine.step(part=part)
    return result


#: The attribute of a torch optimizer that says which engine steps in its place, and its number there.
ROUTE = "_zeroplus_route"


class RoutesTorchOptimizers:
    """Routes ``step()``, ``zero_grad()`` and methods of their own of torch optimizers that upstream has been given.

    The user may have kept them: under DDP a module may step its own reference. They have a rank's partition of the
    weights, whose gradients are there only while the engine steps.

    Args:
        engine: The engine.
        optimizers: The torch optimizers, by their numbers; None: it is the only one.
    """

    def __init__(self, engine: Any, optimizers: Mapping[int | None, Any]) -> None:
        self._routed: list[tuple[Any, str, Any, Any]] = []
        for part, optimizer in optimizers.items():
            setattr(optimizer, ROUTE, (weakref.ref(engine), part))
            routes: dict[str, Any] = {"step": _routed_step, "zero_grad": _routed_zero_grad}
            own_routes = {name: partial(_routed_method, each) for name, each in own_methods(optimizer).items()}
            for name, made in (routes | own_routes).items():
                own = vars(optimizer).get(name)  # a scheduler's
                method = MethodType(made(getattr(optimizer, name), weakref.ref(engine), part), optimizer)
                setattr(optimizer, name, method)
                self._routed.append((optimizer, name, own, method))

    def close(self) -> None:
        """Give the optimizers their own methods back; what a scheduler has wrapped calls them from now on."""
        for optimizer, name, own, method in self._routed:
            vars(optimizer).pop(ROUTE, None)
            if vars(optimizer).get(name) is method:
                delattr(optimizer, name) if own is None else setattr(optimizer, name, own)
        self._routed.clear()


def _routed_step(own: Callable[..., Any], find: Callable[[], Any], part: int | None) -> Callable[..., Any]:
    @functools.wraps(own)
    def step(self: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        engine = find()
        if engine is None or engine.destroyed or engine.updating:
            return own(**kwargs) if closure is None else own(closure, **kwargs)
        return stepped_by(engine, self, closure, part)

    return step


def _routed_method(
    function: Callable[..., Any], own: Callable[..., Any], find: Callable[[], Any], part: int | None
) -> Callable[..., Any]:
    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine = find()
        if engine is None or engine.destroyed or engine.updating:
            return own(*args, **kwargs)
        users = engine.optimizer if part is None else shown(engine, part)
        return function(users, *args, **kwargs)

    return method


def _routed_zero_grad(own: Callable[..., Any], find: Callable[[], Any], part: int | None) -> Callable[..., Any]:
    @functools.wraps(own)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        engine = find()
        if engine is None or engine.destroyed or engine.stepping:
            own(set_to_none)
        else:
            engine.gradient_accumulation.zero_grad(set_to_none, part)

    return zero_grad


class ZeroesGradients:
    """The part of a gradient accumulation that implements ``zero_grad()``."""

    engine: EngineHost
    optimizer: Any
    guard: Guard | None
    params: list[nn.Parameter]
    averaged: set[int]
    used: set[int]
    life: Life
    shown: ShownGradients

    def zero_grad(self, set_to_none: bool = True, part: int | None = None) -> None:
        """Discard every gradient since the last step, as ``zero_grad()`` does under DDP.

        Args:
            set_to_none: If False, the parameters that had a gradient get a gradient of zero, and a step updates them.
            part: The number of one of several optimizers: discard the gradients of its parameters only.
        """
        if self.engine.stepping:
            self._zero_grad_in_step()
            return  # upstream's own call in the middle of step(), which still needs the averaged gradients
        self.engine.adopt_edited_groups()
        if (now := self.engine.gradient_accumulation) is not self and now is not None:
            now.zero_grad(set_to_none, part)
            return
        if self.guard is not None:
            self.guard.before_zero_grad(not self.life.is_empty)
        if part is not None:
            self.zero_part(part, set_to_none)  # type: ignore[attr-defined]
            return
        zeros = set() if set_to_none else self._have_gradients()
        self.shown.zero(set_to_none)
        self.discard()  # type: ignore[attr-defined]
        self.forget_used(range(len(self.params)))  # type: ignore[attr-defined]
        self._base_zero_grad()
        if zeros:
            self._keep_zeros(zeros)

    def _have_gradients(self) -> set[int]:
        """The parameters that would have a gradient under DDP, used up or not."""
        if self.life.is_waiting:
            with torch.no_grad():
                self._make_averaged()  # type: ignore[attr-defined]
        return self.averaged | self.used

    def _keep_zeros(self, indices: set[int]) -> None:
        """Give these parameters a gradient of zero; the gradients in their partitions were dropped."""
        self.averaged |= indices
        self.life.goes_on(Event.SET)

    def _zero_grad_in_step(self) -> None:
        self._base_zero_grad()

    def _base_zero_grad(self) -> None:
        optimizer: Any = self.optimizer
        super(RoutedZeroGrad, optimizer).zero_grad(set_to_none=True)  # type: ignore[misc]


class ZeroesGradientsOfModule:
    """The part of an engine that drops the gradients of its module; it comes before upstream's class."""

    gradient_accumulation: Any
    updating: bool

    def zero_grad(self) -> None:
        """Drop all gradients; in a step at stage 0, without upstream's walk through all modules."""
        if self.updating:
            accumulation = self.gradient_accumulation
            for index in accumulation.optimized:  # no optimizer has the others, and under DDP they keep theirs
                write_plain(accumulation.params[index], None)
        else:
            super().zero_grad()  # type: ignore[misc]


def zero_stale_offloaded(optimizer: Any) -> None:
    """Zero the fp32 gradients on the CPU of parameters without a gradient in this step, at stages 1 and 2.

    Upstream keeps them from step to step: the parameters would be updated with the gradients of an earlier step.
    """
    for index, group in enumerate(optimizer.params_in_partition):
        for param in group:
            param_id = optimizer.get_param_id(param)
            if param_id not in optimizer._offload_accumulated_param_ids:
                _, _, offset, numel = optimizer.grad_position[param_id]
                optimizer.single_partition_of_fp32_groups[index].grad.view(-1).narrow(0, offset, numel).zero_()
