"""A flat tensor that a torch optimizer steps parameter by parameter, against the same parameters by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zeroplus.engine.optimizer.split_steps import SplitSteps, Stretch

SIZES = (4, 3, 5)
STRETCHES = [Stretch(0, 0, 4), Stretch(1, 4, 3), Stretch(2, 7, 5)]
#: Which parameters have no gradient, step by step.
MISSING = [set(), {1}, set(), {0, 2}, {0, 1, 2}, set()]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, 0.1, weight_decay=0.1),
    "adam, foreach": lambda params: torch.optim.Adam(params, 0.1, amsgrad=True, foreach=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.1, lr_decay=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 0.1, momentum=0.5, centered=True),
    "nadam": lambda params: torch.optim.NAdam(params, 0.1),
}


def _gradient(step: int) -> Tensor:
    return torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_separate_parameters(name: str) -> None:
    start = _gradient(-1)
    flat = start.clone().requires_grad_(True)
    alone = [part.clone().requires_grad_(True) for part in start.split(SIZES)]
    optimizer, reference = OPTIMIZERS[name]([flat]), OPTIMIZERS[name](alone)
    split = SplitSteps(lambda: optimizer, lambda: [(flat, STRETCHES)])
    for step, missing in enumerate(MISSING):
        flat.grad = _gradient(step)
        for index, (param, grad) in enumerate(zip(alone, _gradient(step).split(SIZES), strict=True)):
            param.grad = None if index in missing else grad.clone()
        split.without(frozenset(missing))
        assert bool(split.pieces) == (step > 0), "cut before it was needed, or too late"
        optimizer.step()
        reference.step()
        assert torch.equal(flat.detach(), torch.cat([param.detach() for param in alone]))
        assert optimizer.param_groups[0]["params"] == [flat]
    assert not torch.equal(flat.detach(), start)
    pieces = split.pieces[id(flat)]
    assert [float(optimizer.state[pieces[i]].get("step", 0)) for i in range(3)] == [
        float(reference.state[param].get("step", 0)) for param in alone
    ]


def test_nothing_is_cut_while_all_have_gradients() -> None:
    flat = torch.ones(12, requires_grad=True)
    optimizer = torch.optim.Adam([flat])
    split = SplitSteps(lambda: optimizer, lambda: pytest.fail("asked for stretches"))
    for _ in range(3):
        flat.grad = torch.ones(12)
        split.without(frozenset())
        optimizer.step()
    assert not split.pieces and list(optimizer.state) == [flat]


def test_a_step_that_raises_leaves_the_groups_as_they_were() -> None:
    class Fails(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if self.fails:
                raise FloatingPointError
            super().step(closure)

    flat = torch.ones(12, requires_grad=True)
    optimizer = Fails([flat], 1.0)
    split = SplitSteps(lambda: optimizer, lambda: [(flat, STRETCHES)])
    flat.grad = torch.ones(12)
    split.without(frozenset({0}))
    with pytest.raises(FloatingPointError):
        optimizer.step()
    optimizer.fails = False
    split.without(frozenset({0}))
    optimizer.step()
    assert optimizer.param_groups[0]["params"] == [flat]
    assert flat.tolist() == [1.0] * 4 + [0.0] * 8
    split.close()
    flat.grad = torch.ones(12)
    optimizer.step()
    assert flat.tolist() == [0.0] * 4 + [-1.0] * 8


def test_a_parameter_without_elements_on_this_rank_counts_its_steps() -> None:
    flat = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.Adam([flat], 0.1)
    split = SplitSteps(lambda: optimizer, lambda: [(flat, [Stretch(0, 0, 4), Stretch(1, 0, 0)])])
    for missing in ({0}, set()):
        flat.grad = torch.ones(4)
        split.without(frozenset(missing))
        optimizer.step()
    pieces = split.pieces[id(flat)]
    assert [float(optimizer.state[pieces[index]]["step"]) for index in (0, 1)] == [1, 2]


def test_the_step_of_a_subclass_is_one_step() -> None:
    """Torch calls the hooks in the parent's `step` as well, once there is an optimizer of the parent's class."""

    class Doubles(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            self.seen = [param.numel() for param in self.param_groups[0]["params"]]

    torch.optim.SGD([torch.ones(1, requires_grad=True)], 1.0)
    flat = torch.ones(12, requires_grad=True)
    optimizer = Doubles([flat], 1.0)
    split = SplitSteps(lambda: optimizer, lambda: [(flat, STRETCHES)])
    flat.grad = torch.ones(12)
    split.without(frozenset({0}))
    optimizer.step()
    assert optimizer.seen == [stretch.numel for stretch in STRETCHES], "the parent's step has ended it"
