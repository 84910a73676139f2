"""The state of an engine while its partitions are made anew."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_zeroplus.checkpoint.names import by_number, joint_key, sorted_states
from lightning_zeroplus.engine.optimizer.chain import all_groups, settings_of
from lightning_zeroplus.engine.state.layout import parameter_shape
from lightning_zeroplus.engine.state.parts import EngineState, Part, assemble, by_name


class OptimizerStates(NamedTuple):
    """The states of one torch optimizer, by its own keys.

    Attributes:
        parts: This rank's elements of those with one element for each element of the parameter.
        elementwise: By name of the parameter, their keys and dtypes: the same on all ranks.
        others: By name of the parameter, the other states.
    """

    parts: list[Part]
    elementwise: dict[str, dict[str, torch.dtype]]
    others: dict[str, dict[str, Any]]

    def split(self, names: Container[str]) -> tuple[OptimizerStates, OptimizerStates]:
        """The states of these parameters, and those of others."""

        def of(wanted: bool) -> OptimizerStates:
            return OptimizerStates(
                [part for part in self.parts if (part.name in names) is wanted],
                {name: each for name, each in self.elementwise.items() if (name in names) is wanted},
                {name: each for name, each in self.others.items() if (name in names) is wanted},
            )

        return of(True), of(False)


def merged(first: OptimizerStates, second: OptimizerStates) -> OptimizerStates:
    """The states of parameters that are in one of the two."""
    return OptimizerStates(
        first.parts + second.parts, first.elementwise | second.elementwise, first.others | second.others
    )


#: Of an optimizer that has none yet.
NO_STATES = OptimizerStates([], {}, {})


def made_before(optimizer: Any, module: nn.Module) -> OptimizerStates:
    """The states of an optimizer that has never been an engine's: its constructor made them, or the user loaded them.

    Args:
        optimizer: The optimizer, which has states of whole parameters.
        module: The module whose parameters it updates.
    """
    found = OptimizerStates([], {}, {})
    for name, param in module.named_parameters():
        state = optimizer.state.get(param)
        if state:
            each = sorted_states(state, parameter_shape(param))
            found.parts.extend(Part(name, key, 0, state[key].detach().flatten()) for key in each["elementwise"])
            found.elementwise[name], found.others[name] = each["elementwise"], each["others"]
    return found


class Carried:
    """Weights and optimizer states, by parameter, as copies of this rank's partitions.

    Args:
        engine: A :class:`~lightning_zeroplus.engine.engine.ZeroPlusEngine`.

    Attributes:
        states: For each of the engine's torch optimizers, its states.

    Raises:
        ValueError: If the engine's optimizer states are on NVMe.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        state = EngineState(engine)
        self._summary = state.summary(with_optimizer=True)
        parts = [part._replace(data=part.data.clone()) for part in state.own_parts(with_optimizer=True)]
        self._weights = [part for part in parts if part.state is None]
        states = [part for part in parts if part.state is not None]
        self.states = self._by_optimizer(states, self._summary["optimizer"]["states"])

    def _by_optimizer(self, parts: Sequence[Part], summary: Mapping[str, Any]) -> list[OptimizerStates]:
        chain = self._engine.gradient_accumulation.chain
        if chain is None:
            return [_of_one(parts, summary)]
        if chain.shares:
            return [_of_one(parts, summary, number=number) for number in range(len(chain.parts))]
        names = {param: name for name, param in self._engine.module.named_parameters()}
        owned: list[set[str]] = [set() for _ in chain.parts]
        for group, owner in zip(self._engine.user_groups.params, chain.owners, strict=True):
            owned[owner].update(names[param] for param in group if param in names)
        return [_of_one(parts, summary, mine) for mine in owned]

    def give_back(self, states: Sequence[OptimizerStates]) -> None:
        """Load weights and states into the new partitions. One reduction for each is enough: this is rare.

        Args:
            states: For each of the torch optimizers that the engine has now.
        """
        state = EngineState(self._engine)
        chain = self._engine.gradient_accumulation.chain
        shares = chain is not None and chain.shares
        optimizer: dict[str, Any] = {
            "states": _joined(states, shares),
            "groups": [{"settings": settings_of(group)} for group in all_groups(state.optimizer)],
        }
        mine = by_name([*self._weights, *_keyed(states, shares)])
        staged = state.buffers_for(optimizer)
        wanted = by_name(staged.parts())
        for name, param in self._engine.module.named_parameters():
            for key in (None, *optimizer["states"].get(name, {}).get("elementwise", ())):
                whole = assemble(mine.get((name, key), []), parameter_shape(param), self._engine.device).flatten()
                for part in wanted.get((name, key), ()):
                    part.data.copy_(whole.narrow(0, part.start, part.data.numel()))
        state.load(staged, self._summary | {"optimizer": optimizer}, {})


def _of_one(
    parts: Sequence[Part], summary: Mapping[str, Any], names: set[str] | None = None, number: int | None = None
) -> OptimizerStates:
    """The states of one optimizer.

    Args:
        parts: The elements of all states.
        summary: By name of the parameter, the keys of these, and the other states.
        names: The optimizer's parameters; None: all.
        number: The optimizer's number in the keys; None: they have none.
    """

    def own(states: Mapping[Any, Any]) -> dict[Any, Any]:
        return dict(states) if number is None else by_number(states).get(number, {})

    here = [name for name in summary if names is None or name in names]
    return OptimizerStates(
        [part._replace(state=key) for part in parts if part.name in here for key in own({part.state: None})],
        {name: own(summary[name]["elementwise"]) for name in here},
        {name: own(summary[name]["others"]) for name in here},
    )


def _joined(states: Sequence[OptimizerStates], shares: bool) -> dict[str, dict[str, Any]]:
    joined: dict[str, dict[str, Any]] = {}
    for number, each in enumerate(states):
        for name, keys in each.elementwise.items():
            mine = joined.setdefault(name, {"elementwise": {}, "others": {}})
            mine["elementwise"] |= {_key(number, key, shares): dtype for key, dtype in keys.items()}
            mine["others"] |= {_key(number, key, shares): value for key, value in each.others[name].items()}
    return joined


def _keyed(states: Sequence[OptimizerStates], shares: bool) -> list[Part]:
    every = ((number, part) for number, each in enumerate(states) for part in each.parts)
    return [part._replace(state=_key(number, part.state, shares)) for number, part in every]


def _key(number: int, key: Any, shares: bool) -> Any:
    return joint_key(number, key) if shares else key
