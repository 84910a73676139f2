"""Torch optimizers that others have replaced, until they are the engine's again or the fit ends."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from lightning_zeroplus.engine.optimizer.anew.carried import OptimizerStates
from lightning_zeroplus.engine.optimizer.chain import give_back
from lightning_zeroplus.engine.optimizer.groups import unwrapped

_MARK = "_zeroplus_replaced"


class Mark:
    """What a replaced torch optimizer keeps.

    Args:
        optimizer: The torch optimizer, which has the module's parameters.
        engine: The engine.
        states: Its states, as partitions; None: it has them itself.
        handles: What the user has in its place.
    """

    def __init__(self, optimizer: Optimizer, engine: Any, states: OptimizerStates | None, handles: list[Any]) -> None:
        self._engine, self.states, self.handles = weakref.ref(engine), states, handles
        for handle in handles:
            handle.__class__, handle.__dict__ = ReplacedOptimizer, {"optimizer": optimizer}
        self._own_step = vars(optimizer).get("step")  # a scheduler's
        optimizer.step = MethodType(_step_again, optimizer)  # type: ignore[method-assign]
        if states is not None:
            optimizer.state = _Elsewhere(dict)
        setattr(optimizer, _MARK, self)

    @property
    def engine(self) -> Any:
        """The engine."""
        return self._engine()

    def remove(self, optimizer: Optimizer) -> None:
        """Give the torch optimizer its own step back; its states are empty if they were partitions."""
        del optimizer.step
        if self._own_step is not None:
            optimizer.step = self._own_step  # type: ignore[method-assign]
        if self.states is not None:
            optimizer.state = defaultdict(dict)
        delattr(optimizer, _MARK)


class _Elsewhere(defaultdict[Any, Any]):
    """In place of the states of a replaced torch optimizer, which are partitions."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(
            "`optimizer.state` of a torch optimizer that others have replaced (`trainer.optimizers = ...`). ZeRO has"
            " its states in partitions: read the states of what `trainer.optimizers` had in its place."
        )

    __getitem__ = __iter__ = items = _refuse


class ReplacedOptimizer(Optimizer):
    """What the user still has of upstream's optimizer, around a torch optimizer that was replaced.

    With its first use it is one of the engine's again, and changes its class.
    """

    optimizer: Any

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, beside the optimizers that have replaced it."""
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the torch optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The torch optimizer's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The states by parameter."""
        now: Any = come_back(self)
        return now._states_of_parameters()


def _step_again(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    return come_back(optimizer).step(closure)


def torch_optimizer_of(optimizer: Any) -> Any:
    """The torch optimizer of what was never the engine's, or was replaced."""
    found = unwrapped(optimizer)
    return found.optimizer if isinstance(found, ReplacedOptimizer) else found


def mark_of(optimizer: Any) -> Mark | None:
    """The mark of a torch optimizer; None: it was not replaced."""
    return vars(optimizer).get(_MARK)


def end_marks(optimizers: list[Any]) -> None:
    """The fit ends: leave replaced torch optimizers as they came, or mark them as used up."""
    for optimizer in optimizers:
        mark = mark_of(optimizer)
        if mark is not None:
            mark.remove(optimizer)
            if mark.states is not None:
                give_back(optimizer, True, ())


def come_back(optimizer: Any) -> Any:
    """Let an optimizer that was replaced be one of the engine's again, beside the others; a collective.

    Args:
        optimizer: What the user has of it.

    Returns:
        What takes its place; ``optimizer`` if it was not replaced.
    """
    found = torch_optimizer_of(optimizer)
    mark = mark_of(found)
    if mark is None:
        return optimizer
    return mark.engine.replace_optimizers([*mark.engine.shown_optimizers(), found])[-1]


def was_replaced(optimizer: Any) -> bool:
    """Whether others have replaced an optimizer of an engine."""
    return mark_of(torch_optimizer_of(optimizer)) is not None
