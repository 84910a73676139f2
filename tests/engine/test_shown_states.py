"""States by parameter, against a torch optimizer that has them so."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zeroplus.engine.optimizer.shown_states import StatesOf, load_state_dict, state_dict


class _Shown:
    """The states of a torch optimizer, without an engine."""

    def __init__(self, states: Any) -> None:
        self.states = defaultdict(dict, states)

    def gather(self, number: int) -> Any:
        return self.states


def _trained() -> torch.optim.Adam:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.Adam([{"params": layer.parameters(), "lr": 0.1 * (at + 1)} for at, layer in enumerate(net)])
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return optimizer


def _of(optimizer: torch.optim.Optimizer) -> StatesOf:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return StatesOf(_Shown(optimizer.state), params)  # type: ignore[arg-type]


def test_the_state_dict_is_torchs() -> None:
    optimizer = _trained()
    assert repr(state_dict(_of(optimizer), optimizer.param_groups)) == repr(optimizer.state_dict())


def test_what_was_saved_is_loaded() -> None:
    optimizer = _trained()
    saved = copy.deepcopy(optimizer.state_dict())
    states, groups = _of(optimizer), optimizer.param_groups
    states.clear()
    groups[1]["lr"] = 7.0
    load_state_dict(states, groups, saved)
    assert repr(state_dict(states, groups)) == repr(saved)


def test_the_state_of_other_groups_is_refused_before_anything_is_changed() -> None:
    optimizer = _trained()
    before = repr(state_dict(_of(optimizer), optimizer.param_groups))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][1]["params"].pop()
    saved["param_groups"][0]["lr"] = 7.0
    states = _of(optimizer)
    with pytest.raises(ValueError, match="parameter groups that do not match"):
        load_state_dict(states, optimizer.param_groups, saved)
    assert repr(state_dict(states, optimizer.param_groups)) == before


def test_other_parameters_have_no_states_here() -> None:
    states, other = _of(_trained()), nn.Parameter(torch.zeros(1))
    with pytest.raises(KeyError):
        states[other]
    with pytest.raises(KeyError):
        states[other] = {}
