"""Hooks of the engine that rest in a backward of a window, because autograd does all that there is to do."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_zeroplus as zp
from lightning_zeroplus.engine.hooks.received import ReceivesGradients, TakesWholeGradients
from lightning_zeroplus.engine.reduction.local_sums import LocalSums
from tests.strategy.test_fabric import fabric


def _calls(stage: int) -> tuple[list[int], bool]:
    """The calls of hooks in each backward of a window, the fourth of them the user's own; whether the sum is right."""
    run = fabric(zp.ZeroPlusFabricStrategy(stage, reduction="step"))
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    owner = TakesWholeGradients if stage == 3 else ReceivesGradients
    calls, upstream, counted = 0, owner._before_added, []

    def before_added(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return upstream(*args)

    with patch.object(owner, "_before_added", before_added):
        accumulation = model._forward_module.gradient_accumulation
        accumulation.hooks.remove()
        accumulation._watch(range(len(accumulation.params)))  # again, with the function that counts
        for index in range(5):
            before = calls
            loss = model(torch.full((1, 4), dist.get_rank() + 1.0)).sum()
            loss.backward() if index == 3 else run.backward(loss)
            counted.append(calls - before)
    return counted, torch.equal(net[1].bias.grad, torch.full((2,), 5.0))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hooks_are_called_in_the_first_backward_and_in_the_users_own(ranks2: Any, stage: int) -> None:
    assert ranks2.run(_calls, stage) == [([4, 0, 0, 4, 0], True)] * 2


def test_they_are_called_again_when_sums_are_taken_out() -> None:
    woken: list[bool] = []
    sums = LocalSums(True, True, {0: nn.Parameter(torch.ones(2))}, lambda: woken.append(sums.lie_in_grads))
    sums.begin_backward()
    assert sums.lie_in_grads and not woken
    sums.take_out()
    assert woken == [False]
