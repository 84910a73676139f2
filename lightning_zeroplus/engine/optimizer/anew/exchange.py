"""Torch optimizers of an engine are exchanged, or get another group; what the user has of them stays right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_zeroplus.engine.optimizer.anew.carried import NO_STATES, OptimizerStates, made_before, merged
from lightning_zeroplus.engine.optimizer.anew.marks import Mark, mark_of, torch_optimizer_of
from lightning_zeroplus.engine.optimizer.anew.partitions import Changed, become, is_partitioned, make_anew
from lightning_zeroplus.engine.optimizer.chain import ChainedOptimizer, give_back, move_states, params_of, parts_of
from lightning_zeroplus.engine.optimizer.elementwise import needs_whole_tensors, show_groups_where_needed
from lightning_zeroplus.engine.optimizer.groups import UserGroups, unwrapped
from lightning_zeroplus.engine.optimizer.several import OneOfSeveral
from lightning_zeroplus.engine.optimizer.sharing import chain_of
from lightning_zeroplus.gradients.again import EvaluatesAgain


def refuse_now(engine: Any, what: str, remedy: str) -> None:
    """Refuse to make partitions anew where that is impossible.

    Args:
        engine: The engine.
        what: What happened.
        remedy: What to do instead, before the fit.

    Raises:
        RuntimeError: Within a window, or if the engine is compiled; nothing was changed.
    """
    if engine.compilation is not None:
        raise RuntimeError(
            f"{what} under `compile`, where the partitions cannot be made anew. {remedy} before the fit."
        )
    if engine.gradient_accumulation.holding:
        raise RuntimeError(
            f"{what} inside a coalesce() window or no_sync(), where the partitions cannot be made anew. {remedy} before"
            " the fit or between two steps."
        )


def refuse_new(engine: Any, params: Sequence[Any], what: str) -> None:
    """Refuse parameters that came into the module during the fit.

    Args:
        engine: The engine.
        params: The parameters of an optimizer, or of a group.
        what: Who was given them.

    Raises:
        ValueError: If one did; nothing was changed.
    """
    if any(id(param) not in engine.gradient_accumulation.index for param in params):
        raise ValueError(
            f"`{what}` was given a parameter that the module did not have when the fit began: its gradients"
            " would not be averaged over the ranks. Make it before the fit, with `requires_grad_(False)` until it is"
            " needed, or begin another fit."
        )


_DEPARTED = "_zeroplus_departed"


class Exchange:
    """The torch optimizers of an engine, before and after.

    Args:
        engine: The engine.
        optimizers: All that the user will step.
        group: A group that one of them gets, and its number among those of before.
        groups: The groups that one of them has from now on, each with its parameters, and its number.

    Raises:
        ValueError: If one has a parameter that came into the module during the fit.
    """

    def __init__(
        self,
        engine: Any,
        optimizers: Sequence[Any],
        group: tuple[dict[str, Any], int] | None = None,
        groups: tuple[list[tuple[Any, list[Any]]], int] | None = None,
    ) -> None:
        self._engine, self._group, self._groups = engine, group, groups
        self._before = parts_of(engine.basic_optimizer)
        self._numbers = [number_of(engine, each) for each in optimizers]
        self._after = [
            torch_optimizer_of(each) if number is None else self._before[number]
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

    def run(self) -> list[Any]:
        """Build the engine's optimizer anew; a collective.

        Returns:
            What the user steps from now on.

        Raises:
            ValueError: If the ranks exchange different optimizers; nothing was changed.
        """
        make_anew(self._engine, self._change, self._details())
        move_states(self._engine.basic_optimizer)
        return self._hand_over()

    def _details(self) -> str:
        """What is exchanged: the same on all ranks."""
        index = self._engine.gradient_accumulation.index
        each = (_described(each, index) if number is None else str(number) for each, number in self._each())
        added = [] if self._group is None else [params_of(self._group[0])]
        groups = added if self._groups is None else [params for _, params in self._groups[0]]
        return "; ".join([*each, *(str([index[id(param)] for param in params]) for params in groups)])

    def _change(self, states: list[OptimizerStates]) -> Changed:
        """Take the torch optimizers apart, and join others."""
        engine = self._engine
        old, users = engine.basic_optimizer, engine.user_groups
        partitioned = is_partitioned(engine)
        if isinstance(old, ChainedOptimizer):
            old.part_ways()
        if not partitioned:
            give_back(old, False, (engine.gradient_accumulation.mixin, EvaluatesAgain))
            vars(old).pop("gradient_accumulation", None)
        if self._group is not None:
            self._before[self._group[1]].add_param_group(self._group[0])
        if self._groups is not None:
            for group, params in self._groups[0]:
                group["params"] = params
            self._before[self._groups[1]].param_groups = [group for group, _ in self._groups[0]]
        given = [self._taken(each, number, states) for each, number in self._each()]
        replaced = [number for number in range(len(self._before)) if number not in self._numbers]
        for number in replaced:
            own = states[number] if partitioned else None
            Mark(self._before[number], engine, own, self._handles_before[number])
        whole = any(
            self._had_whole_tensors if number is not None else partitioned and needs_whole_tensors(each)
            for each, number in self._each()
        )
        if partitioned:
            show_groups_where_needed(each for each, _ in self._each())
        made = self._after[0] if len(self._after) == 1 else chain_of(self._after)
        engine.client_optimizer, engine.user_groups = made, UserGroups(made)
        here = {param for group in engine.user_groups.params for param in group}
        engine.user_groups.trained = users.trained & here
        engine.user_groups.replaced = [*users.replaced, *(self._before[number] for number in replaced)]
        lists = ((at, users.lists.get(number)) for at, number in enumerate(self._numbers))
        engine.user_groups.lists = {at: shown for at, shown in lists if shown is not None}
        return Changed(made, [self._with_departed(*each) for each in zip(self._after, given, strict=True)], whole)

    def _with_departed(self, optimizer: Any, states: OptimizerStates) -> OptimizerStates:
        """The states of an optimizer's parameters. Those of others that have left it wait until these come back."""
        names = {param: name for name, param in self._engine.module.named_parameters()}
        here = {names[param] for group in optimizer.param_groups for param in group["params"] if param in names}
        states, departed = merged(vars(optimizer).pop(_DEPARTED, NO_STATES), states).split(here)
        if departed.others:
            setattr(optimizer, _DEPARTED, departed)
        return states

    def _taken(self, optimizer: Any, number: int | None, states: list[OptimizerStates]) -> OptimizerStates:
        """Note what the user has of an optimizer that steps afterwards; its states."""
        mark = mark_of(optimizer)
        if mark is not None:
            mark.remove(optimizer)
            self._handles.append(mark.handles)
            return mark.states or NO_STATES
        self._handles.append([] if number is None else self._handles_before[number])
        if not states:
            return NO_STATES
        return made_before(optimizer, self._engine.module) if number is None else states[number]

    def _hand_over(self) -> list[Any]:
        """Turn what the user has of each optimizer into what takes its place."""
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
