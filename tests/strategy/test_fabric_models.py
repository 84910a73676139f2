"""Several models of a Fabric: whose gradients are whose, in windows, in fp16, and when one of them steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lightning_zeroplus as zp
from tests.matrix.cells import trained_weights
from tests.strategy.test_fabric import STAGES, fabric

_PARTITION_ALL = {"stage3_param_persistence_threshold": 0}


def _two_models(stage: int) -> None:
    """Each optimizer steps its own model, in whatever order backwards and steps come."""
    run = fabric(zp.ZeroPlusFabricStrategy(stage, config={"zero_optimization": _PARTITION_ALL}))
    torch.manual_seed(0)
    nets = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    before = [net.weight.detach().clone() for net in nets]
    (one, step_one), (two, step_two) = (run.setup(net, torch.optim.SGD(net.parameters(), 1.0)) for net in nets)
    x = torch.ones(1, 2)
    with pytest.raises(RuntimeError, match="2 models were set up"):
        run.strategy.coalesce()
    with run.strategy.coalesce(model=one):
        run.backward(one(x).sum(), model=one)
        run.backward(two(x).sum(), model=two)
        step_two.step()
        with pytest.raises(RuntimeError, match="inside a coalesce"):
            step_one.step()
    step_one.step()
    step_two.zero_grad()
    run.backward(two(x).sum(), model=two)
    step_two.step()
    for net, start, steps in zip(nets, before, (1, 2), strict=True):
        (weight,) = trained_weights(net, None)
        assert torch.equal(weight, start - steps), (weight, start)


@pytest.mark.parametrize("stage", STAGES)
def test_two_models(ranks2: Any, stage: int) -> None:
    ranks2.run(_two_models, stage)


def _different_loss_scales(stage: int) -> list[list[float]]:
    """Models of which one's loss scale has become half of the other's, in every kind of backward.

    Returns:
        For each backward and step the weights, then the loss scales.
    """
    fp16 = {"initial_scale_power": 4, "hysteresis": 1}
    run = fabric(zp.ZeroPlusFabricStrategy(stage, config={"fp16": fp16}), "16-true")
    nets = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    for net in nets:
        nn.init.zeros_(net.weight)
    (one, step_one), (two, step_two) = (run.setup(net, torch.optim.SGD(net.parameters(), 1.0)) for net in nets)
    x = torch.full((1, 2), float(1 + run.global_rank))  # 1.5 on average
    seen: list[list[float]] = []

    def step() -> None:
        for optimizer in (step_one, step_two):
            optimizer.step()
            optimizer.zero_grad()
        weights = [float(trained_weights(net, None)[0][0, 0]) for net in nets]
        seen.append([*weights, *(engine._forward_module.loss_scale_factor() for engine in (one, two))])

    run.backward(one(x).sum() * (torch.inf if run.global_rank == 0 else 1.0), model=one)
    step()
    run.backward(one(x).sum() + two(x).sum())  # of both
    step()
    (one(x).sum() + two(x).sum()).backward()  # without a scale
    step()
    run.backward(one(x).sum() + two(x).sum(), model=one)  # with the scale of one of them
    step()
    with run.no_backward_sync(one), run.no_backward_sync(two):
        run.backward(one(x).sum() + two(x).sum())
    (one(x).sum() + two(x).sum()).backward()
    step()
    run.backward(one(x).sum() + two(x).sum() * (torch.inf if run.global_rank == 1 else 1.0))
    step()
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_models_with_different_loss_scales(ranks2: Any, stage: int) -> None:
    scales = 8.0, 16.0
    want = [
        [0.0, 0.0, *scales],
        [-1.5, -1.5, *scales],
        [-3.0, -3.0, *scales],
        [-4.5, -4.5, *scales],
        [-7.5, -7.5, *scales],
        [-9.0, -7.5, 8.0, 8.0],
    ]
    assert ranks2.run(_different_loss_scales, stage) == [want, want]


def _windows_of_both(stage: int) -> list[int]:
    """Two backwards of two models, in a window of each: nothing is reduced until they end."""
    run = fabric(zp.ZeroPlusFabricStrategy(stage, reduction="backward"))
    torch.manual_seed(0)
    nets = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    before = [net.weight.detach().clone() for net in nets]
    (one, step_one), (two, step_two) = (run.setup(net, torch.optim.SGD(net.parameters(), 1.0)) for net in nets)
    x = torch.full((1, 2), float(run.global_rank))
    with run.strategy.coalesce(model=one) as first, run.strategy.coalesce(model=two) as second:
        run.backward((one(x) + two(x)).sum())
        run.backward((one(x) + two(x)).sum())
        counts = [first.parameters, second.parameters]
    for optimizer in (step_one, step_two):
        optimizer.step()
    for net, start in zip(nets, before, strict=True):
        (weight,) = trained_weights(net, None)
        torch.testing.assert_close(weight, start - 2 * 0.5)  # the mean of 0 and 1, twice
    return counts


@pytest.mark.parametrize("stage", STAGES)
def test_windows_of_two_models(ranks2: Any, stage: int) -> None:
    assert ranks2.run(_windows_of_both, stage) == [[1, 1]] * 2
