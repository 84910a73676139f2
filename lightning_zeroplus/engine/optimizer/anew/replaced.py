"""Other optimizers take the place of an engine's in the middle of a fit, as ``trainer.optimizers = [...]`` asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_zeroplus.engine.families.zeroes import ROUTE
from lightning_zeroplus.engine.optimizer.anew.carried import NO_STATES, OptimizerStates
from lightning_zeroplus.engine.optimizer.anew.marks import Mark, mark_of
from lightning_zeroplus.engine.optimizer.anew.partitions import (
    Changed,
    become,
    is_partitioned,
    make_anew,
    refuse_new,
    refuse_now,
)
from lightning_zeroplus.engine.optimizer.chain import ChainedOptimizer, give_back, move_states, parts_of
from lightning_zeroplus.engine.optimizer.elementwise import needs_whole_tensors
from lightning_zeroplus.engine.optimizer.groups import UserGroups, unwrapped
from lightning_zeroplus.engine.optimizer.several import OneOfSeveral
from lightning_zeroplus.engine.optimizer.sharing import chain_of
from lightning_zeroplus.gradients.again import EvaluatesAgain


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


def come_back(optimizer: Any) -> Any:
    """Let an optimizer that was replaced be one of the engine's again, beside the others; a collective.

    Args:
        optimizer: What the user has of it.

    Returns:
        What takes its place; ``optimizer`` if it was not replaced.
    """
    found = _torch_optimizer(optimizer)
    mark = mark_of(found)
    if mark is None:
        return optimizer
    return replace(mark.engine, [*mark.engine.shown_optimizers(), found])[-1]


def was_replaced(optimizer: Any) -> bool:
    """Whether others have replaced an optimizer of an engine."""
    return mark_of(_torch_optimizer(optimizer)) is not None


def _step_again(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    return come_back(optimizer).step(closure)


def stepped(optimizer: Any) -> Any:
    """What steps, and is clipped, in place of an optimizer of an engine, or of a wrapper of one.

    Raises:
        RuntimeError: If no engine has it.
    """
    found = come_back(optimizer)
    if hasattr(found, "gradient_accumulation"):
        return found
    find, part = vars(unwrapped(found)).get(ROUTE, (lambda: None, None))
    engine = find()
    if engine is None:
        raise RuntimeError(
            f"This {type(optimizer).__name__} is not one that trains: it was not returned by `configure_optimizers()`,"
            " assigned to `trainer.optimizers`, or set up by Fabric (`model, optimizer = fabric.setup(model,"
            " optimizer)`)."
        )
    return engine.optimizer if part is None else engine.shown_optimizers()[part]


def number_of(engine: Any, optimizer: Any) -> int | None:
    """The number of an optimizer among those of the engine; None: it is not one of them.

    Args:
        engine: A :class:`~lightning_zeroplus.engine.engine.ZeroPlusEngine`.
        optimizer: The torch optimizer, what the user steps in its place, or a wrapper of that.
    """
    found = unwrapped(optimizer)
    if isinstance(found, OneOfSeveral):
        return found.number if found.engine is engine else None
    parts = parts_of(engine.basic_optimizer)
    if found is engine.optimizer and len(parts) == 1:
        return 0
    return next((number for number, part in enumerate(parts) if part is found), None)


def replace(engine: Any, optimizers: Sequence[Any], what: str = "`trainer.optimizers = ...`") -> list[Any]:
    """Let other optimizers update the parameters of an engine; a collective.

    Those that the engine has already keep their states. Others are torch optimizers. One that the engine had before
    has its states again.

    Args:
        engine: A :class:`~lightning_zeroplus.engine.engine.ZeroPlusEngine`.
        optimizers: All that the user will step.
        what: What the user has called, for messages.

    Returns:
        What the user steps, in the order of ``optimizers``.

    Raises:
        ValueError: If one has a parameter that came into the module during the fit; nothing was changed.
        RuntimeError: Within a window or a step, or if the engine is compiled; nothing was changed.
    """
    refuse_now(engine, what, "Make all optimizers")
    if engine.stepping:
        raise RuntimeError(f"{what} within an optimizer step: exchange optimizers between two steps.")
    exchange = _Exchange(engine, optimizers)
    engine.meet()  # forwards may have run since the last backward
    make_anew(engine, exchange, exchange.details())
    move_states(engine.basic_optimizer)
    return exchange.hand_over()


class _Exchange:
    """The torch optimizers of an engine, before and after.

    Args:
        engine: The engine.
        optimizers: All that the user will step.

    Raises:
        ValueError: If one has a parameter that came into the module during the fit.
    """

    def __init__(self, engine: Any, optimizers: Sequence[Any]) -> None:
        self._engine = engine
        self._before = parts_of(engine.basic_optimizer)
        self._numbers = [number_of(engine, each) for each in optimizers]
        self._after = [
            _torch_optimizer(each) if number is None else self._before[number]
            for each, number in zip(optimizers, self._numbers, strict=True)
        ]
        for each, number in self._each():
            if number is None:
                params = [param for group in each.param_groups for param in group["params"]]
                refuse_new(engine, params, f"{type(each).__name__}()")
        self._handles_before = _handles(engine)
        self._handles: list[list[Any]] = []
        self._had_whole_tensors = engine.gradient_accumulation.split_steps.has_whole_tensors

    def _each(self) -> Iterator[tuple[Any, int | None]]:
        """What steps afterwards, each with the number that it has before."""
        return zip(self._after, self._numbers, strict=True)

    def details(self) -> str:
        """What is exchanged: the same on all ranks."""
        index = self._engine.gradient_accumulation.index
        return "; ".join(_described(each, index) if number is None else str(number) for each, number in self._each())

    def __call__(self, states: list[OptimizerStates]) -> Changed:
        """Take the torch optimizers apart, and join others: a :data:`~.partitions.Change`."""
        engine = self._engine
        old, users = engine.basic_optimizer, engine.user_groups
        is_partitioned = engine.optimizer is not old
        if isinstance(old, ChainedOptimizer):
            old.part_ways()
        if not is_partitioned:
            give_back(old, False, (engine.gradient_accumulation.mixin, EvaluatesAgain))
            vars(old).pop("gradient_accumulation", None)
        given = [self._taken(each, number, states) for each, number in self._each()]
        replaced = [number for number in range(len(self._before)) if number not in self._numbers]
        for number in replaced:
            self._mark(number, states[number] if is_partitioned else None)
        whole = any(
            self._had_whole_tensors if number is not None else is_partitioned and needs_whole_tensors(each)
            for each, number in self._each()
        )
        made = self._after[0] if len(self._after) == 1 else chain_of(self._after)
        engine.client_optimizer, engine.user_groups = made, UserGroups(made)
        here = {param for group in engine.user_groups.params for param in group}
        engine.user_groups.trained = users.trained & here
        engine.user_groups.replaced = [*users.replaced, *(self._before[number] for number in replaced)]
        return Changed(made, given, whole)

    def _taken(self, optimizer: Any, number: int | None, states: list[OptimizerStates]) -> OptimizerStates:
        """Note what the user has of an optimizer that steps afterwards; its states."""
        mark = mark_of(optimizer)
        if mark is not None:
            mark.remove(optimizer)
            self._handles.append(mark.handles)
            return mark.states or NO_STATES
        self._handles.append([] if number is None else self._handles_before[number])
        return NO_STATES if number is None or not states else states[number]

    def _mark(self, number: int, states: OptimizerStates | None) -> None:
        optimizer, handles = self._before[number], self._handles_before[number]
        for handle in handles:
            handle.__class__, handle.__dict__ = ReplacedOptimizer, {"optimizer": optimizer}
        Mark(optimizer, self._engine, states, handles, _step_again)

    def hand_over(self) -> list[Any]:
        """Turn what the user has of each optimizer into what takes its place.

        Returns:
            What the user steps from now on.
        """
        engine = self._engine
        shown = engine.shown_optimizers()
        for at, handles in enumerate(self._handles):
            for handle in handles:
                become(handle, shown[at])
                shown[at] = handle
                if isinstance(handle, OneOfSeveral):
                    engine.gradient_accumulation.chain.handles.add(handle)
                else:
                    engine.optimizer = handle
        return shown


def _torch_optimizer(optimizer: Any) -> Any:
    """The torch optimizer of what was never the engine's, or was replaced."""
    found = unwrapped(optimizer)
    return found.optimizer if isinstance(found, ReplacedOptimizer) else found


def _described(optimizer: Any, index: Mapping[int, int]) -> str:
    params = [[index[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} of {params}"


def _handles(engine: Any) -> list[list[Any]]:
    """For each optimizer of the engine, what the user may have of it; none where that is the torch optimizer itself."""
    chain = engine.gradient_accumulation.chain
    if chain is None:
        return [[engine.optimizer] if is_partitioned(engine) else []]
    handles: list[list[Any]] = [[] for _ in chain.parts]
    for handle in chain.handles:
        handles[handle.number].append(handle)
    return handles
