"""The parameter groups that a checkpoint holds: those of the user's optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from lightning_zeroplus.engine.optimizer.chain import settings_of
from lightning_zeroplus.engine.state.layout import Slot, parameter_shape


class Group(NamedTuple):
    """A parameter group as the user made it.

    Attributes:
        owner: The number of its optimizer.
        settings: The group without its parameters.
        params: The module's parameters, in order.
        names: The names of those that are optimized, sorted.
    """

    owner: int
    settings: dict[str, Any]
    params: list[nn.Parameter]
    names: list[str]


def groups(engine: Any, optimizer: Any, slots: Iterable[Slot]) -> list[Group]:
    """The groups of all optimizers.

    Args:
        engine: A :class:`~lightning_zeroplus.engine.engine.ZeroPlusEngine`.
        optimizer: The torch optimizer within upstream's.
        slots: Those of the engine.
    """
    names: list[set[str]] = [set() for _ in optimizer.param_groups]
    for slot in slots:
        if slot.group is not None:
            names[slot.group].update(slot.members)
    users = engine.user_groups.params
    if optimizer is engine.optimizer:  # without upstream's around it the user may have added some
        users = [group["params"] for group in optimizer.param_groups]
    if not hasattr(optimizer, "parts"):
        each = zip(optimizer.param_groups, users, names, strict=True)
        return [Group(0, settings_of(group), list(params), sorted(found)) for group, params, found in each]
    made = []
    for owner, links in enumerate(optimizer.links):
        for indices, (group, params) in zip(links, optimizer.groups_of_users(owner, users), strict=True):
            found = set().union(*(names[index] for index in indices))
            made.append(Group(owner, settings_of(group), list(params), sorted(found)))
    return made


def described(groups: Iterable[Group], names: dict[nn.Parameter, str]) -> list[dict[str, Any]]:
    """Groups as plain data. A torch optimizer numbers its states in the order of its parameters, which ``shapes`` has.

    Args:
        groups: The groups.
        names: The names of the module's parameters.
    """
    return [
        {
            "names": group.names,
            "settings": group.settings,
            "owner": group.owner,
            "shapes": {names[param]: list(parameter_shape(param)) for param in group.params if param in names},
        }
        for group in groups
    ]
