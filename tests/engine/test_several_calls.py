"""Upstream calls ``step()`` several times in one update: each call begins with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zeroplus.engine.upstream.several_calls import as_one_step


class Counts(torch.optim.Optimizer):
    """Counts its steps in an attribute, in groups, and in a tensor of each group; a flag says that it has begun."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        self.began = True
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["tensor"].add_(1)
            group["kind"] = group["kind"] or False
            group["late"] = torch.zeros(()) if group["late"] is None else group["late"]
            group["late"].add_(1)


def _make() -> Counts:
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    settings = {"tensor": torch.zeros(()), "kind": None, "late": None}
    return Counts([{"params": [first], **settings}, {"params": [second], **settings, "tensor": torch.zeros(())}], {})


def test_groups_that_every_call_sees_count_once() -> None:
    optimizer = _make()
    for update in (1, 2):
        with as_one_step([optimizer, None]):
            for _ in range(3):
                optimizer.step()
        assert optimizer.steps == update and optimizer.began
        for group in optimizer.param_groups:
            assert group["step"] == group["tensor"] == group["late"] == update
            assert group["kind"] is False


def test_groups_that_one_call_sees_count_it() -> None:
    optimizer = _make()
    groups = optimizer.param_groups
    with as_one_step([optimizer]):
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
    assert optimizer.steps == 1
    assert [group["step"] for group in groups] == [1, 1]


def test_nothing_is_left_behind() -> None:
    optimizer = _make()
    with as_one_step([optimizer]):
        optimizer.step()
    optimizer.step()
    optimizer.step()
    assert optimizer.steps == 3


def test_a_call_sees_the_groups_with_parameters() -> None:
    optimizer = _make()
    groups, (first, second) = optimizer.param_groups, (group["params"] for group in optimizer.param_groups)
    for own in ((first, []), ([], second)):
        for group, params in zip(groups, own, strict=True):
            group["params"] = params
        with as_one_step([optimizer]):
            optimizer.step()
    assert optimizer.param_groups is groups
    assert [group["step"] for group in groups] == [1, 1]


def test_a_step_that_raises_leaves_all_groups() -> None:
    class Raises(Counts):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ValueError("no")

    optimizer = Raises([nn.Parameter(torch.ones(1))], {})
    groups = optimizer.param_groups
    with pytest.raises(ValueError, match="no"), as_one_step([optimizer]):
        optimizer.step()
    assert optimizer.param_groups is groups
