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


def _refused_in_fp16() -> None:
    """Nothing is touched, and with the names the same losses train."""
    run = fabric(zp.ZeroPlusFabricStrategy(2, config={"fp16": {"loss_scale": 128}}), "16-true")
    nets = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    (one, step_one), (two, _) = (run.setup(net, torch.optim.SGD(net.parameters(), 1.0)) for net in nets)
    x = torch.ones(1, 2)
    with pytest.raises(RuntimeError, match=r"2 models.*loss scale.*fabric\.backward\(loss, model=model\)"):
        run.backward(one(x).sum() + two(x).sum())
    assert all(net.weight.grad is None for net in nets)
    before = nets[0].weight.detach().clone()
    run.backward(one(x).sum(), model=one)
    step_one.step()
    assert torch.equal(nets[0].weight.detach(), before - 1)


def test_several_models_in_fp16(ranks2: Any) -> None:
    ranks2.run(_refused_in_fp16)


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
