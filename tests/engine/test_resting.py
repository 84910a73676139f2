"""Hooks of the engine that rest in a backward of a window, because autograd does all that there is to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_zeroplus as zp
from lightning_zeroplus.engine.hooks.of_parameters import ParameterHooks
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


class _Owner:
    """Whose hooks are tested here."""

    def __init__(self, params: list[nn.Parameter], calls: list[str]) -> None:
        self.hooks = ParameterHooks(self)
        for index, param in enumerate(params):
            self.hooks.register(param, lambda grad, index=index: calls.append(f"engine {index}"), rests=True)


def _backward(params: list[nn.Parameter], within: Callable[[], None]) -> None:
    """A backward in which a function is called before the gradients come."""
    loss = sum(param.sum() for param in params)
    loss.register_hook(lambda grad: within())
    loss.backward()


def test_torch_has_no_hooks_while_they_rest() -> None:
    params, calls = [nn.Parameter(torch.ones(2)) for _ in range(3)], []
    owner, seen = _Owner(params, calls), []
    hooks = [param._backward_hooks for param in params]
    owner.hooks.rest()
    _backward(params, lambda: seen.extend(param._backward_hooks for param in params))
    assert seen == [None] * 3 and not calls
    owner.hooks.wake()
    assert all(param._backward_hooks is each for param, each in zip(params, hooks, strict=True))
    _backward(params, lambda: None)
    assert sorted(calls) == ["engine 0", "engine 1", "engine 2"]


@pytest.mark.parametrize("wakes", [False, True])
def test_a_hook_that_is_registered_while_they_rest_stays_registered(wakes: bool) -> None:
    params, calls = [nn.Parameter(torch.ones(2)) for _ in range(2)], []
    owner, handles = _Owner(params, calls), []

    def register() -> None:
        handles.append(params[0].register_hook(lambda grad: calls.append("user")))
        if wakes:
            owner.hooks.wake()

    owner.hooks.rest()
    _backward(params, register)
    owner.hooks.wake()
    assert sorted(calls) == (["engine 0", "engine 1", "user"] if wakes else ["user"])
    calls.clear()
    _backward(params, owner.hooks.rest)  # the user's hook is called, and ours are not
    owner.hooks.wake()
    assert calls == ["user"]
    calls.clear()
    _backward(params[:1], lambda: None)
    assert calls == ["engine 0", "user"]
    handles[0].remove()
    owner.hooks.rest()
    _backward(params, lambda: None)
    owner.hooks.wake()
    assert calls == ["engine 0", "user"]
    _backward(params[:1], lambda: None)
    assert calls == ["engine 0", "user", "engine 0"]
    owner.hooks.remove()
    assert not any(param._backward_hooks for param in params)


@pytest.mark.parametrize("rest", [False, True])
def test_hooks_are_removed(rest: bool) -> None:
    params = [nn.Parameter(torch.ones(2))]
    owner = _Owner(params, calls := [])
    if rest:
        owner.hooks.rest()
    owner.hooks.remove()
    _backward(params, lambda: None)
    assert not params[0]._backward_hooks and not calls


def test_they_are_called_again_when_sums_are_taken_out() -> None:
    woken: list[bool] = []
    sums = LocalSums(True, True, {0: nn.Parameter(torch.ones(2))}, lambda: woken.append(sums.lie_in_grads))
    sums.begin_backward()
    assert sums.lie_in_grads and not woken
    sums.take_out()
    assert woken == [False]
