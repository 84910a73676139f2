"""The optimizer's parameter groups as the user made them; upstream replaces their parameters by flat partitions."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zeroplus.engine.optimizer.chain import parts_of
from lightning_zeroplus.gradients.patches.step_hooks import without_users_step_hooks
from lightning_zeroplus.weights.trainable import made_trainable


class UserGroups:
    """The parameters of an optimizer's groups, including frozen ones, as they were before upstream changed the groups.

    Args:
        optimizer: The user's torch optimizer; its groups hold the module's parameters.

    Attributes:
        params: The parameters of each group, in order.
        trained: The parameters that upstream's optimizer had before, or that have a state in a checkpoint.
        replaced: Torch optimizers that others have replaced during the fit.
        lists: What the user has got of the groups, by the number of the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.trained: set[nn.Parameter] = set()
        self.replaced: list[Any] = []
        self.lists: dict[int, ShownGroups] = {}
        self.params: list[list[nn.Parameter]] = [list(group["params"]) for group in optimizer.param_groups]

    @classmethod
    def of_all(cls, optimizer: Optimizer, module: nn.Module) -> UserGroups:
        """The groups of an optimizer that upstream has made itself, over all trainable parameters of ``module``."""
        groups = cls(optimizer)
        groups.params = [[param for param in module.parameters() if param.requires_grad]]
        return groups

    def restore(self) -> None:
        """Put the module's parameters into the groups again, and clear the optimizer's state."""
        for group, params in zip(self._optimizer.param_groups, self.params, strict=True):
            group["params"] = list(params)
        self._optimizer.state.clear()

    def show(self, number: int, groups: Sequence[tuple[dict[str, Any], Sequence[nn.Parameter]]]) -> ShownGroups:
        """The groups of an optimizer as the user gets them: always the same list, as torch's."""
        shown = self.lists.setdefault(number, ShownGroups())
        if not shown.are_edited():
            shown.show(groups)
        return shown

    def edited(self) -> tuple[int, ShownGroups] | None:
        """The number of an optimizer whose groups the user has edited, and these."""
        return next((each for each in self.lists.items() if each[1].are_edited()), None)

    @contextmanager
    def each_with_a_trainable(self) -> Iterator[None]:
        """Give every group a trainable parameter within, which upstream requires to build its optimizer.

        No hook of the user's is called within. Parameters in ``trained`` are trainable within, too: they may be frozen
        for a while, but have a state.
        """
        everything = [param for group in self.params for param in group]
        with made_trainable(param for param in everything if param in self.trained):
            empty = [group for group in self.params if group and not _any_trainable(group)]
            with (
                made_trainable(min(group, key=nn.Parameter.numel) for group in empty),
                self._trainable_first(),
                without_users_step_hooks(parts_of(self._optimizer)),
            ):
                yield

    @contextmanager
    def _trainable_first(self) -> Iterator[None]:
        """Begin the first group with a trainable parameter within.

        Upstream takes the dtype of all partitions, and whether there is a loss scale, from the first parameter. A
        frozen one may have another dtype.
        """
        group: dict[str, Any] = next(iter(self._optimizer.param_groups), {"params": []})  # none: nothing is optimized
        own = group["params"]
        group["params"] = ordered = sorted(own, key=lambda param: not param.requires_grad)
        try:
            yield
        finally:
            if group["params"] is ordered:  # upstream, at stage 0, has not put its partitions there
                group["params"] = own


def _any_trainable(params: Sequence[nn.Parameter]) -> bool:
    return any(param.requires_grad for param in params)


class ShownGroup(MutableMapping[str, Any]):
    """A parameter group with the module's parameters. Everything else is read from, and written to, the real group.

    Args:
        group: The optimizer's real group.
        params: The module's parameters.
    """

    def __init__(self, group: dict[str, Any], params: Sequence[nn.Parameter]) -> None:
        self.real = group
        self._params = list(params)

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else self.real[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            self._params = list(value)
        else:
            self.real[key] = value

    def __delitem__(self, key: str) -> None:
        del self.real[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.real)

    def __len__(self) -> int:
        return len(self.real)

    def __repr__(self) -> str:
        return repr(dict(self))


class ShownGroups(list[Any]):
    """The groups of an optimizer. Before a forward or a step, the engine looks whether the user has edited them."""

    def __init__(self) -> None:
        super().__init__()
        self._before: list[tuple[Any, list[Any]]] = []

    def show(self, groups: Sequence[tuple[dict[str, Any], Sequence[nn.Parameter]]]) -> None:
        """Show these real groups with the module's parameters; a group that was here stays the same object."""
        known = {id(group.real): group for group in self if isinstance(group, ShownGroup)}
        self[:] = [known.get(id(group)) or ShownGroup(group, params) for group, params in groups]
        for group, (_, params) in zip(self, groups, strict=True):
            if not _are_same(group["params"], params):
                group["params"][:] = params
        self.note()

    def note(self) -> None:
        """What is here now is what the optimizer has."""
        self._before = [(group, list(group["params"])) for group in self]

    def are_edited(self) -> bool:
        """Whether groups or parameters have come, or gone."""
        return len(self) != len(self._before) or any(
            group is not before or not _are_same(group["params"], params)
            for group, (before, params) in zip(self, self._before, strict=True)
        )


class ShowsGroups:
    """Mixin for upstream's optimizers: ``param_groups`` has the module's parameters, as under DDP."""

    @property
    def param_groups(self: Any) -> Any:
        """The groups with the module's parameters; upstream and the engine see the real groups.

        Others may be assigned. Where they have other parameters, the engine makes new partitions: a collective.
        """
        if sees_partitions(self, sys._getframe(1)):
            return self.optimizer.param_groups
        return unwrapped(self)._shown_groups()

    @param_groups.setter
    def param_groups(self: Any, value: Any) -> None:
        if sees_partitions(self, sys._getframe(1)):
            self.optimizer.param_groups = value
        else:
            take_over(unwrapped(self), value, 0)

    def _shown_groups(self: Any) -> ShownGroups:
        users = self.gradient_accumulation.engine.user_groups
        return users.show(0, list(zip(self.optimizer.param_groups, users.params, strict=True)))

    @property
    def defaults(self: Any) -> dict[str, Any]:
        """The torch optimizer's ``defaults``."""
        return self.optimizer.defaults

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``; makes new partitions and keeps all states. A collective.

        Raises:
            RuntimeError: Within a window, or under ``compile``; nothing was changed.
        """
        optimizer = unwrapped(self)
        if optimizer is not self:
            optimizer.add_param_group(param_group)  # it may have become one of several
            return
        self.gradient_accumulation.engine.rebuild(param_group)


class ShowsMethods:
    """Mixin for what the user has in place of a torch optimizer: the methods of its class, such as ``eval()``.

    They run with the module's parameters and their whole states, which this object shows, and may use methods and
    attributes of their own.
    """

    def __getattr__(self: Any, name: str) -> Any:
        """Find what this object does not have; not for upstream, nor for the engine."""
        is_asked_here = name.startswith("__") or name in ("gradient_accumulation", "optimizer")
        if not is_asked_here and not sees_partitions(self, sys._getframe(1)):
            optimizer = unwrapped(self).optimizer
            if (method := _own_functions(optimizer).get(name)) is not None:
                return MethodType(method, self)
            if name in vars(optimizer) and not hasattr(Optimizer, name):
                return vars(optimizer)[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def own_methods(optimizer: Any) -> dict[str, Callable[..., Any]]:
    """The public methods that a torch optimizer has besides those of ``torch.optim.Optimizer``, by name."""
    found = _own_functions(optimizer)
    return {name: each for name, each in found.items() if not name.startswith("_") and not hasattr(Optimizer, name)}


def _own_functions(optimizer: Any) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for cls in reversed(type(optimizer).__mro__):
        if not cls.__module__.startswith(("torch.", *_ENGINES)):
            found |= {name: each for name, each in vars(cls).items() if isinstance(each, FunctionType)}
    return found


#: Packages whose code works on the partitions.
_ENGINES = ("deepspeed.", "lightning_zeroplus.")


def unwrapped(optimizer: Any) -> Any:
    """Upstream's optimizer; ``optimizer`` may be the wrapper that a Trainer or Fabric gives to the user."""
    return vars(optimizer).get("_optimizer", optimizer)


def sees_partitions(optimizer: Any, caller: FrameType, others: tuple[str, ...] = ()) -> bool:
    """Whether ``caller`` gets the real groups and states, which hold partitions.

    Args:
        optimizer: Upstream's optimizer, or a wrapper of it.
        caller: The frame that asks.
        others: Prefixes of further modules that get them, besides DeepSpeed and this package.
    """
    name = str(caller.f_globals.get("__name__", ""))
    is_made = getattr(unwrapped(optimizer), "gradient_accumulation", None) is not None
    return not is_made or name.startswith(_ENGINES + others)


def take_over(optimizer: Any, groups: Sequence[MutableMapping[str, Any]], number: int) -> None:
    """Give an optimizer other groups, or the settings of ``groups`` where they have the same parameters.

    Args:
        optimizer: What the user has of the optimizer.
        groups: The groups, with the module's parameters.
        number: The optimizer's number.
    """
    shown = optimizer.param_groups
    if len(groups) == len(shown) and all(
        _are_same(group["params"], each["params"]) for group, each in zip(groups, shown, strict=True)
    ):
        _settle(shown, groups)
    else:
        optimizer.gradient_accumulation.engine.assign_groups(groups, number)


def _are_same(params: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(params) == len(others) and all(map(operator.is_, params, others))


def _settle(groups: Iterable[MutableMapping[str, Any]], others: Iterable[MutableMapping[str, Any]]) -> None:
    for group, settings in zip(groups, others, strict=False):
        group.update((key, value) for key, value in settings.items() if key != "params")


def keep_users_optimizer(upstreams: Any, users: Optimizer) -> None:
    """Let upstream step with the user's Adagrad, and not with the one that it has built from the defaults.

    Upstream builds another one because Adagrad makes its state when it is constructed. But schedulers, and settings of
    groups, belong to the user's optimizer.

    Args:
        upstreams: Upstream's optimizer, just built.
        users: The torch optimizer that upstream was given.
    """
    made = getattr(upstreams, "optimizer", users)
    if made is users or not isinstance(users, torch.optim.Adagrad):
        return
    upstreams.optimizer = users
    upstreams._link_all_hp_params()  # of all groups; upstream's Adagrad has only one
    users.state.clear()
    users.state.update(made.state)
    for group in users.param_groups:
        for param in group["params"]:
            if param in users.state:
                users.state[param]["sum"].fill_(group["initial_accumulator_value"])
