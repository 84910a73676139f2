"""Several torch optimizers as one, which upstream partitions like any other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import methodcaller
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer
from torch.utils._pytree import tree_map_only

from lightning_zeroplus.checkpoint.names import is_step
from lightning_zeroplus.gradients.patches.specialize import generalize


class ChainedOptimizer(Optimizer):
    """The parameter groups of several optimizers, one after the other. A step runs all of them, or one.

    The groups are the optimizers' own dicts, and all share one ``state``. So what upstream changes in the chain is
    changed in the optimizers too, and for their schedulers.

    Args:
        parts: The optimizers, over disjoint parameters; see :mod:`.sharing` for others.

    Attributes:
        parts: The optimizers.
        owners: For each group, the index of its optimizer.
        shares: Whether several have the same parameters: :class:`.SharingOptimizers`.
        active: The index of the optimizer that steps; None: all step.
        handles: What the Trainer, Fabric and the user have in place of the optimizers.

    Raises:
        ValueError: If a parameter is in several groups.
    """

    shares = False

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        self.owners = [number for number, part in enumerate(self.parts) for _ in part.param_groups]
        self.active: int | None = None
        self.handles: WeakSet[Any] = WeakSet()
        shared = set.intersection(*(set(part.defaults) for part in self.parts))
        super().__init__(
            [group for part in self.parts for group in part.param_groups],
            {key: value for key, value in self.parts[0].defaults.items() if key in shared},
        )
        for part in self.parts:
            self.state.update(part.state)
        self._share()

    def _share(self) -> None:
        for number, part in enumerate(self.parts):
            part.state = self.state
            part.param_groups = self.groups_of(number)

    def part_ways(self) -> None:
        """Give each optimizer its own states and groups, as it had them before."""
        for part in self.parts:
            mine = {param for group in part.param_groups for param in group["params"]}
            part.state = defaultdict(dict, {param: own for param, own in self.state.items() if param in mine})

    def groups_of(self, number: int) -> list[Any]:
        """The chain's groups of one optimizer."""
        return [group for group, owner in zip(self.param_groups, self.owners, strict=True) if owner == number]

    @property
    def links(self) -> list[list[tuple[int, ...]]]:
        """By optimizer and group of it: the indices of the chain's groups that have its parameters."""
        numbers = range(len(self.parts))
        return [[(index,) for index, owner in enumerate(self.owners) if owner == number] for number in numbers]

    def groups_of_users(
        self, number: int, groups: Sequence[Sequence[nn.Parameter]]
    ) -> list[tuple[dict[str, Any], Sequence[nn.Parameter]]]:
        """An optimizer's groups, each with the module's parameters.

        Args:
            number: The index of the optimizer.
            groups: The module's parameters in each of the chain's groups.
        """
        every = zip(self.param_groups, groups, self.owners, strict=True)
        return [(group, params) for group, params, owner in every if owner == number]

    @property
    def names(self) -> str:
        """The names of the optimizers' classes."""
        return " + ".join(type(part).__name__ for part in self.parts)

    @contextmanager
    def only(self, number: int) -> Iterator[None]:
        """Let a step within run one optimizer only."""
        self.active = number
        try:
            yield
        finally:
            self.active = None

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the active optimizers with the groups that the chain has now.

        Upstream takes groups out of the chain, and parameters out of groups, to step them one by one.

        Args:
            closure: Must be None.
        """
        assert closure is None, "the engine has run it"
        here = set(map(id, self.param_groups))
        for number, part in enumerate(self.parts):
            groups = [group for group in part.param_groups if id(group) in here and group["params"]]
            if self.active in (None, number) and groups:
                everything, part.param_groups = part.param_groups, groups
                try:
                    if isinstance(part, Adagrad):
                        have_state(part)
                    part.step()
                finally:
                    part.param_groups = everything

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()
        for part in self.parts:
            part.__setstate__({"state": self.state, "param_groups": part.param_groups})


def all_groups(optimizer: Any) -> list[dict[str, Any]]:
    """The groups of an optimizer, or of all that it chains, one after the other, as they are saved."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    if getattr(optimizer, "shares", False):
        groups = [group for part in optimizer.parts for group in part.param_groups]
    return groups


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def params_of(group: Mapping[str, Any]) -> list[Any]:
    """The parameters of a group that was not added yet."""
    given = group["params"]
    params = [given] if isinstance(given, Tensor) else list(given)
    return [param[1] if isinstance(param, tuple) else param for param in params]


def have_state(optimizer: Adagrad) -> None:
    """Give tensors that are new to Adagrad the state that its constructor makes."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state[param]:
                start = torch.full_like(param, group["initial_accumulator_value"])
                optimizer.state[param] = {"step": torch.tensor(0.0), "sum": start}


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that ``optimizer`` chains, or ``[optimizer]``."""
    return optimizer.parts if isinstance(optimizer, ChainedOptimizer) else [optimizer]


_USED_UP = "_zeroplus_used_up"


def give_back(optimizer: Any, used_up: bool, mixins: Iterable[type]) -> None:
    """Leave a torch optimizer as it came, for another fit, or mark that there cannot be one.

    Args:
        optimizer: The optimizer of an engine that is being destroyed.
        used_up: Whether its groups and states are the engine's.
        mixins: What its class, or that of an optimizer that it chains, may have been specialized with.
    """
    if used_up:
        for part in parts_of(optimizer):
            setattr(part, _USED_UP, True)
        return
    for each in dict.fromkeys((optimizer, *parts_of(optimizer))):
        for mixin in mixins:
            if isinstance(each, mixin):
                generalize(each, mixin)


def states_of(optimizer: Any) -> list[dict[Tensor, dict[str, Any]]]:
    """The states that each optimizer has by parameter: its constructor has made them, or the user has loaded them."""
    return [
        {param: dict(state) for param, state in part.state.items() if isinstance(param, Tensor) and state}
        for part in parts_of(optimizer)
    ]


def move_states(optimizer: Any) -> None:
    """Move states to the parameters, as Lightning does under DDP; numbers of steps stay.

    A fit before has left them on the host. Adagrad makes them in its constructor, before the model is on its device.
    """
    for part in parts_of(optimizer):
        for param, state in part.state.items():
            if not isinstance(param, Tensor):
                continue  # of no parameter
            move = methodcaller("to", param.device)
            for key, value in state.items():
                if not is_step(key):
                    state[key] = tree_map_only(Tensor, move, value)  # LBFGS has lists


def is_used_up(optimizer: Any) -> bool:
    """Whether :func:`give_back` has marked ``optimizer``."""
    return getattr(optimizer, _USED_UP, False)


def name_of(optimizer: Any) -> str:
    """The name of an optimizer's class, or the names for a chain."""
    return optimizer.names if isinstance(optimizer, ChainedOptimizer) else type(optimizer).__name__
