"""The loss scale of fp16, which changes after a step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from deepspeed.comm import init_distributed
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from torch import nn

import lightning_zeroplus as zp
from lightning_zeroplus.engine.scaling import loss_scaler
from tests.matrix.cells import trained_weights
from tests.strategy.test_fabric import fabric


def _both_scales() -> list[tuple[float, float]]:
    """Of ours and of torch, after steps of which some overflow."""
    init_distributed("gloo")  # upstream's scale asks for the rank before it logs an overflow
    found = []
    for window in (1, 2, 5):
        settings = DeepSpeedFP16Config(loss_scale_window=window, hysteresis=1, min_loss_scale=0, initial_scale_power=3)
        ours, torchs = loss_scaler(settings), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=window)
        torchs.scale(torch.ones(1))
        generator = random.Random(window)
        for _ in range(60):
            overflow = generator.random() < 0.2
            ours.update_scale(overflow)
            weight = nn.Parameter(torch.ones(1))
            weight.grad = torch.full((1,), torch.inf if overflow else 1.0)
            torchs.step(torch.optim.SGD([weight], 0.1))
            torchs.update()
            found.append((ours.cur_scale, torchs.get_scale()))
    return found


def test_the_loss_scale_of_mixed_precision_is_that_of_torch(ranks2: Any) -> None:
    """Upstream's grows one step later than torch's."""
    for found in ranks2.run(_both_scales):
        assert len(set(found)) > 20 and all(ours == torchs for ours, torchs in found)


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
