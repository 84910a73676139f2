"""Whether the update of a group depends on the others, and whether random numbers are drawn, is found out."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer

from lightning_zeroplus.engine.optimizer.elementwise import draws_random_numbers, needs_all_groups
from lightning_zeroplus.engine.upstream.several_calls import as_one_step, show_all_groups
from lightning_zeroplus.strategy.deepspeed.config.checks import check_optimizer


class _Listed(Optimizer):
    """The learning rate at the beginning is in a list, by position."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.first = [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group, first in zip(self.param_groups, self.first, strict=False):
            self.update(group, first)

    def update(self, group: dict[str, Any], first: float) -> None:
        group["step"] = group.get("step", 0) + 1
        for param in group["params"]:
            param.sub_(param.grad, alpha=first * group["lr"] / group["step"])


class _ListedForeach(_Listed):
    """The same for all tensors of a group at once, of which torch wants at least one."""

    def update(self, group: dict[str, Any], first: float) -> None:
        torch._foreach_sub_(group["params"], [param.grad for param in group["params"]], alpha=first * group["lr"])


class _Plain(_Listed):
    def update(self, group: dict[str, Any], first: float) -> None:
        super().update(group, group["lr"])


class _Noisy(_Plain):
    def __init__(self, params: Any, draw: Any) -> None:
        super().__init__(params)
        self.draw = draw

    def update(self, group: dict[str, Any], first: float) -> None:
        super().update({**group, "lr": group["lr"] * float(self.draw())}, first)


def _groups() -> list[dict[str, Any]]:
    layer = nn.Linear(3, 2)
    return [{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.01}]


def test_positions_are_found_out() -> None:
    assert needs_all_groups(_Listed(_groups()))
    assert not needs_all_groups(_Listed(_groups()[:1]))
    assert not needs_all_groups(_Plain(_groups())) and not needs_all_groups(torch.optim.AdamW(_groups()))


def test_what_can_be_stepped_neither_way_is_refused() -> None:
    optimizer = _ListedForeach(_groups())
    assert needs_all_groups(optimizer) is None
    check_optimizer(optimizer, 0, "32-true")
    with pytest.raises(MisconfigurationException, match="`_ListedForeach`.*stage 2 updates one group after the other"):
        check_optimizer(optimizer, 2, "32-true")


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(()), random.random, lambda: torch.rand((), generator=torch.Generator().manual_seed(1))]
)
def test_random_numbers_are_noticed_and_stay(draw: Any) -> None:
    optimizer, plain = _Noisy(_groups(), draw), _Plain(_groups())
    before = torch.get_rng_state(), random.getstate()
    assert draws_random_numbers(optimizer) and not draws_random_numbers(plain)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    with pytest.raises(MisconfigurationException, match="`_Noisy` draws random numbers"):
        check_optimizer(optimizer, 1, "32-true")


def test_the_others_are_in_their_places_as_they_were() -> None:
    """A call for the second group sees the first one without parameters, with the numbers from before the update."""
    seen: list[Any] = []

    class Seen(_Plain):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            seen.append([(group.get("step"), len(group["params"])) for group in self.param_groups])
            super().step(closure)

    optimizer = Seen(_groups())
    show_all_groups(optimizer)
    groups = optimizer.param_groups
    for param in (param for group in groups for param in group["params"]):
        param.grad = torch.ones_like(param)
    for _ in range(2):
        with as_one_step([optimizer]):
            for group in groups:
                optimizer.param_groups = [group]
                optimizer.step()
                optimizer.param_groups = groups
    assert [group["step"] for group in groups] == [2, 2]
    assert all(one is other for one, other in zip(optimizer.param_groups, groups, strict=True))
    assert seen == [[(None, 1), (None, 0)], [(None, 0), (None, 1)], [(1, 1), (1, 0)], [(1, 0), (1, 1)]]
