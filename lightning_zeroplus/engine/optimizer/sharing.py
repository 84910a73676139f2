"""Several torch optimizers that update the same parameters, as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from lightning_zeroplus.checkpoint.names import by_number, joint_key
from lightning_zeroplus.engine.optimizer.chain import (
    ChainedOptimizer,
    all_groups,
    have_state,
    settings_of,
)

_NAMES = "param_names"


def chain_of(parts: Sequence[Optimizer]) -> ChainedOptimizer:
    """Several optimizers as one."""
    sets = [{param for group in part.param_groups for param in group["params"]} for part in parts]
    return ChainedOptimizer(parts) if len(set().union(*sets)) == sum(map(len, sets)) else SharingOptimizers(parts)


class SharingOptimizers(ChainedOptimizer):
    """Several optimizers of which some update the same parameters, for example Adam first and LBFGS later.

    Upstream needs each parameter in one group. So the chain has groups of its own, which only say which parameters are
    flattened together: those that are in the same groups of the optimizers. In a step, a group of an optimizer has what
    the chain's groups with its parameters have then. The optimizers keep their groups and settings. Each has its own
    states, which :attr:`state` shows together, by :func:`~lightning_zeroplus.checkpoint.names.joint_key`.

    Args:
        parts: The optimizers.
    """

    shares = True

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        self.active: int | None = None
        self.handles = WeakSet()
        places: dict[nn.Parameter, list[tuple[int, int]]] = {}
        for number, part in enumerate(self.parts):
            for at, group in enumerate(part.param_groups):
                for param in group["params"]:
                    places.setdefault(param, []).append((number, at))
        alike: dict[tuple[tuple[int, int], ...], list[nn.Parameter]] = {}
        for param, where in places.items():
            alike.setdefault(tuple(where), []).append(param)
        self._links = [
            [tuple(index for index, where in enumerate(alike) if (number, at) in where) for at in range(len(groups))]
            for number, groups in enumerate(part.param_groups for part in self.parts)
        ]
        first = [self.parts[where[0][0]].param_groups[where[0][1]] for where in alike]
        settings = ({key: value for key, value in settings_of(group).items() if key != _NAMES} for group in first)
        common = set.intersection(*(set(part.defaults) for part in self.parts))
        Optimizer.__init__(
            self,
            [{**each, "params": params} for each, params in zip(settings, alike.values(), strict=True)],
            {key: value for key, value in self.parts[0].defaults.items() if key in common},
        )
        self._groups = list(self.param_groups)  # upstream takes groups out

    def part_ways(self) -> None:
        """Nothing: each optimizer has its own states and groups."""

    @property
    def links(self) -> list[list[tuple[int, ...]]]:
        return self._links

    def groups_of_users(
        self, number: int, groups: Sequence[Sequence[nn.Parameter]]
    ) -> list[tuple[dict[str, Any], Sequence[nn.Parameter]]]:
        return [(group, group["params"]) for group in self.parts[number].param_groups]

    @property
    def state(self) -> Any:
        """The states of all optimizers."""
        return _JointStates(self.parts)

    @state.setter
    def state(self, value: Mapping[Tensor, dict[str, Any]]) -> None:
        self.state.update(value)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the engine has run it"
        here = set(map(id, self.param_groups))
        for number, part in enumerate(self.parts):
            if self.active not in (None, number):
                continue
            users = self._lend(number, here)
            everything, part.param_groups = part.param_groups, [group for group in part.param_groups if group["params"]]
            try:
                if part.param_groups:
                    if isinstance(part, Adagrad):
                        have_state(part)
                    part.step()
            finally:
                part.param_groups = everything
                self._give_back(number, users)

    def _lend(self, number: int, here: Iterable[int] | None = None) -> list[list[nn.Parameter]]:
        """Give an optimizer what the chain's groups have now; return what to give :meth:`_give_back`."""
        groups = self.parts[number].param_groups
        users = [group["params"] for group in groups]
        for group, indices in zip(groups, self._links[number], strict=True):
            lent = [self._groups[index] for index in indices]
            group["params"] = [p for each in lent if here is None or id(each) in here for p in each["params"]]
        return users

    def _give_back(self, number: int, users: list[list[nn.Parameter]]) -> None:
        for group, params in zip(self.parts[number].param_groups, users, strict=True):
            group["params"] = params

    def state_dict(self) -> dict[str, Any]:
        """As upstream saves it, with the settings of the optimizers' groups."""
        made = super().state_dict()
        made["state"] = {number: dict(states) for number, states in made["state"].items()}
        return made | {"settings": [settings_of(group) for group in all_groups(self)]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let each optimizer load its own states and settings.

        Args:
            state_dict: As :meth:`state_dict` returns it.

        Raises:
            ValueError: If it has other groups; nothing was changed.
        """
        saved = [list(group["params"]) for group in state_dict["param_groups"]]
        settings = list(state_dict.get("settings", ()))
        if list(map(len, saved)) != [len(group["params"]) for group in self._groups] or len(settings) != sum(
            len(part.param_groups) for part in self.parts
        ):
            raise ValueError("loaded state dict contains parameter groups that do not match those of the optimizers")
        tensors = [tensor for group in self._groups for tensor in group["params"]]
        numbers = [number for group in saved for number in group]
        states = {
            id(tensor): by_number(state_dict["state"].get(number, {}))
            for tensor, number in zip(tensors, numbers, strict=True)
        }
        for number, part in enumerate(self.parts):
            users = self._lend(number)
            try:
                part.load_state_dict(_own_state_dict(part, number, states, settings))
            finally:
                self._give_back(number, users)

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("the optimizers have the states")


def _own_state_dict(
    part: Optimizer, number: int, states: Mapping[int, Mapping[int, Any]], settings: list[Any]
) -> dict[str, Any]:
    """What an optimizer loads; its groups' ``settings`` are taken off the front."""
    made: dict[str, Any] = {"state": {}, "param_groups": []}
    count = 0
    for group in part.param_groups:
        for at, tensor in enumerate(group["params"], count):
            own = states[id(tensor)].get(number)
            if own:
                made["state"][at] = own
        indices = list(range(count, count + len(group["params"])))
        made["param_groups"].append(settings_of(group) | settings.pop(0) | {"params": indices})
        count += len(indices)
    return made


class _JointStates(MutableMapping[Tensor, Mapping[str, Any]]):
    """The states of several optimizers of the same tensors. All states of a tensor are read, or assigned, at once."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = parts

    def __getitem__(self, tensor: Tensor) -> Mapping[str, Any]:
        joint = {
            joint_key(number, key): value
            for number, part in enumerate(self._parts)
            for key, value in part.state.get(tensor, {}).items()
        }
        return MappingProxyType(joint)  # what would be written to it would be lost

    def __setitem__(self, tensor: Tensor, states: Mapping[str, Any]) -> None:
        own = by_number(states)
        for number, part in enumerate(self._parts):
            if number in own:
                part.state[tensor] = own[number]
            else:
                part.state.pop(tensor, None)

    def __delitem__(self, tensor: Tensor) -> None:
        for part in self._parts:
            part.state.pop(tensor, None)

    def __contains__(self, tensor: object) -> bool:
        return any(tensor in part.state for part in self._parts)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(dict.fromkeys(tensor for part in self._parts for tensor in part.state))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        for part in self._parts:
            part.state.clear()
