"""The loss scale of fp16, which changes after a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lightning_zeroplus as zp
from tests.matrix.cells import trained_weights
from tests.strategy.test_fabric import fabric


def _scales(stage: int, zeroes: bool) -> list[float]:
    """In fp16: the weight after each step, then the loss scale."""
    fp16 = {"initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 1}  # doubled after each step
    run = fabric(zp.ZeroPlusFabricStrategy(stage, config={"fp16": fp16}), "16-true")
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), 1.0))
    seen = []
    for _ in range(3):
        run.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        seen.append(float(trained_weights(net, None)[0]))
        if zeroes:
            optimizer.zero_grad()
    return [*seen, model._forward_module.loss_scale_factor()]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_divides_by_the_scale_of_its_gradients(ranks2: Any, stage: int) -> None:
    for *weights, scale in ranks2.run(_scales, stage, True):
        assert weights == [-1, -2, -3] and scale > 16


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_kept_gradients_follow_the_loss_scale(ranks2: Any, stage: int) -> None:
    for *weights, scale in ranks2.run(_scales, stage, False):
        assert weights == [-1, -3, -6] and scale > 16
