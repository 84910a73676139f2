"""``optimizer.state`` as DDP shows it, although upstream's optimizers keep the states in flat partitions.

The first access gathers the states of all parameters, once. The next step, or a checkpoint, puts them back, with
whatever was written to them. A loop that never accesses a state does neither. If the user has kept states over a step,
they are gathered again after it.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from lightning_zeroplus.checkpoint.names import by_number, joint_key, sorted_states
from lightning_zeroplus.engine.optimizer.chain import all_groups, settings_of
from lightning_zeroplus.engine.optimizer.groups import ShowsMethods, sees_partitions, unwrapped
from lightning_zeroplus.engine.state.followed import Followed, OneState
from lightning_zeroplus.engine.state.layout import parameter_shape
from lightning_zeroplus.gradients.ranks.agreement import Presence

#: Packages that see the states of partitions, besides engines. Lightning needs no others: our strategies save states.
OTHERS = ("lightning.", "pytorch_lightning.", "torch.")
#: Where Fabric's wrapper of an optimizer passes on what the user calls.
_USERS = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")

#: States by parameter.
States = defaultdict[nn.Parameter, Any]


class ShownStates:
    """The whole states while the user looks at them.

    Args:
        engine: A :class:`~lightning_zeroplus.engine.engine.ZeroPlusEngine`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._states: dict[int, States] | None = None
        self._followed: Followed | None = None

    def begin(self, states: Sequence[Mapping[Any, dict[str, Any]]]) -> None:
        """Give the optimizers the states that they had before their parameters were partitioned.

        Args:
            states: Of each optimizer, by parameter.
        """
        self._states = {}
        for number, each in enumerate(states):
            self._states.setdefault(number if self._shares else 0, defaultdict(OneState)).update(each)
        self.put_back()
        self._followed = None

    def gather(self, number: int) -> States:
        """The states of each parameter. The first access since the last step is a collective.

        Args:
            number: The number of one of several optimizers. It matters if they update the same parameters.
        """
        if self._states is None:
            gathered = list(self._gather())
            self._states = {}
            for param, states in gathered:
                for owner, own in (by_number(states) if self._shares else {0: states}).items():
                    self._states.setdefault(owner, defaultdict(OneState))[param] = OneState(own)
        return self._states.setdefault(number if self._shares else 0, defaultdict(OneState))

    def follow(self) -> None:
        """After a step that has put states back: gather them again if the user has kept some, on any rank."""
        followed, self._followed = self._followed, None
        if followed is None:
            return
        here = {0} if followed.is_any_kept() else set()
        if not Presence({0}, here, torch.device("cpu"), self._engine.hosts).result():
            return
        self.gather(0)
        assert self._states is not None
        for (number, param), own in followed.update(_flat(self._states)).items():
            self._states[number][param] = own

    @property
    def _shares(self) -> bool:
        chain = self._engine.gradient_accumulation.chain
        return chain is not None and bool(chain.shares)

    def _joint(self, states: Mapping[int, States], param: nn.Parameter) -> dict[str, Any]:
        if not self._shares:
            return states[0].get(param, {}) if states else {}
        each = ((number, key, value) for number, own in states.items() for key, value in own.get(param, {}).items())
        return {joint_key(number, key): value for number, key, value in each}

    @torch.no_grad()
    def _gather(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        from lightning_zeroplus.engine.state.parts import EngineState, assemble, by_name

        state = EngineState(self._engine)
        parts = by_name(state.own_parts(with_optimizer=True))
        states = state.summary(with_optimizer=True)["optimizer"]["states"]
        for name, param in self._engine.module.named_parameters():
            if name in states:
                shape, keys = parameter_shape(param), states[name]["elementwise"]
                found = {key: assemble(parts.get((name, key), []), shape, self._engine.device) for key in keys}
                found |= copy.deepcopy(states[name]["others"])
                if found:
                    yield param, found

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the states, with whatever was written to them, back to the optimizer."""
        if self._states is None:
            return
        from lightning_zeroplus.engine.state.parts import EngineState

        states, self._states = self._states, None
        self._followed = Followed(_flat(states))
        state = EngineState(self._engine)
        by_name = {name: self._joint(states, param) for name, param in self._engine.module.named_parameters()}
        shapes = {name: parameter_shape(param) for name, param in self._engine.module.named_parameters()}
        saved = {
            "states": {name: sorted_states(each, shapes[name]) for name, each in by_name.items() if each},
            "groups": [{"settings": settings_of(group)} for group in all_groups(state.optimizer)],
        }
        staged = state.buffers_for(saved)
        for part in staged.parts():
            value = None if part.state is None else by_name[part.name].get(part.state)
            if value is not None:
                part.data.copy_(value.reshape(-1).narrow(0, part.start, part.data.numel()))
        groups = state.optimizer.param_groups
        state.load_optimizer(staged, saved)
        if not hasattr(state.optimizer, "parts"):
            for group, loaded in zip(groups, state.optimizer.param_groups, strict=True):
                group.update(loaded)
            state.optimizer.param_groups = groups  # torch makes new ones, and the user may have kept one


def _flat(states: Mapping[int, States]) -> dict[tuple[int, nn.Parameter], Any]:
    return {(number, param): own for number, each in states.items() for param, own in each.items()}


class StatesOf(MutableMapping[nn.Parameter, dict[str, Any]]):
    """The states of some parameters.

    Args:
        shown: The states of all parameters.
        params: The parameters whose states are in this mapping.
        number: See :meth:`ShownStates.gather`.
    """

    def __init__(self, shown: ShownStates, params: Sequence[nn.Parameter], number: int = 0) -> None:
        self._shown, self._number = shown, number
        self._params = dict.fromkeys(params)

    def assign(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Replace all states."""
        self.clear()
        self.update(states)

    def __getitem__(self, param: nn.Parameter) -> dict[str, Any]:
        if param not in self._params:
            raise KeyError(param)
        return self._shown.gather(self._number)[param]

    def __setitem__(self, param: nn.Parameter, states: dict[str, Any]) -> None:
        if param not in self._params:
            raise KeyError(param)
        self._shown.gather(self._number)[param] = states

    def __delitem__(self, param: nn.Parameter) -> None:
        del self._shown.gather(self._number)[param]

    def __iter__(self) -> Iterator[nn.Parameter]:
        states = self._shown.gather(self._number)
        return iter([param for param in self._params if param in states])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


def state_dict(states: StatesOf, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """As ``torch.optim.Optimizer.state_dict``."""
    numbers: dict[nn.Parameter, int] = {}
    packed = []
    for group in groups:
        own = [numbers.setdefault(param, len(numbers)) for param in group["params"]]
        packed.append({**{key: value for key, value in group.items() if key != "params"}, "params": own})
    return {"state": {numbers[param]: dict(states[param]) for param in states}, "param_groups": packed}


def load_state_dict(
    states: StatesOf, groups: Sequence[MutableMapping[str, Any]], state_dict: Mapping[str, Any]
) -> None:
    """As ``torch.optim.Optimizer.load_state_dict``.

    Raises:
        ValueError: If the groups of ``state_dict`` have other sizes; nothing was changed.
    """
    params = list(dict.fromkeys(param for group in groups for param in group["params"]))
    if [len(group["params"]) for group in state_dict["param_groups"]] != [len(group["params"]) for group in groups]:
        raise ValueError("loaded state dict contains parameter groups that do not match those of the optimizer")
    for group, settings in zip(groups, state_dict["param_groups"], strict=True):
        group.update((key, value) for key, value in settings.items() if key != "params")
    states.clear()
    for number, each in state_dict["state"].items():
        states[params[number]] = copy.deepcopy(each)


def _sees_partitions(optimizer: Any, caller: FrameType) -> bool:
    return caller.f_globals.get("__name__") not in _USERS and sees_partitions(optimizer, caller, OTHERS)


class ShowsStates(ShowsMethods):
    """Mixin for upstream's optimizers: states by parameter, as under DDP."""

    @property
    def state(self: Any) -> Any:
        """The states by the module's parameters; upstream, the engine and Lightning see the states of partitions."""
        if _sees_partitions(self, sys._getframe(1)):
            return unwrapped(self).optimizer.state
        return unwrapped(self)._states_of_parameters()

    @state.setter
    def state(self: Any, value: Any) -> None:
        if _sees_partitions(self, sys._getframe(1)):
            unwrapped(self).optimizer.state = value
        else:
            unwrapped(self)._states_of_parameters().assign(value)

    def _states_of_parameters(self: Any) -> StatesOf:
        engine = self.gradient_accumulation.engine
        params = [param for group in engine.user_groups.params for param in group]
        return StatesOf(engine.gradient_accumulation.states, params)

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``torch.optim.Optimizer.state_dict``; upstream and Lightning get the state dict of the partitions."""
        if _sees_partitions(self, sys._getframe(1)):
            return self._state_dict_for_others(*args, **kwargs)
        return unwrapped(self).whole_state_dict()

    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``torch.optim.Optimizer.load_state_dict``; upstream and Lightning load the state dict of the partitions.

        Raises:
            ValueError: If the groups of the state dict have other sizes; nothing was changed.
        """
        if _sees_partitions(self, sys._getframe(1)):
            return self._load_for_others(*args, **kwargs)
        return unwrapped(self).load_whole_state_dict(*args, **kwargs)

    def whole_state_dict(self: Any) -> dict[str, Any]:
        """As ``torch.optim.Optimizer.state_dict``, whoever calls it; a collective."""
        return state_dict(self._states_of_parameters(), self._shown_groups())

    def load_whole_state_dict(self: Any, saved: Mapping[str, Any]) -> None:
        """As ``torch.optim.Optimizer.load_state_dict``, whoever calls it; a collective.

        Raises:
            ValueError: If the groups of ``saved`` have other sizes; nothing was changed.
        """
        load_state_dict(self._states_of_parameters(), self._shown_groups(), saved)

    def _state_dict_for_others(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def _load_for_others(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
