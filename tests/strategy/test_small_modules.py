"""On the CPU the weights of a small module stay whole between two steps of stage 3."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from lightning_zeroplus.strategy.deepspeed.config import settings
from tests.support.training import everywhere, trainer

_WIDTH = 400  # whose square is more than DeepSpeed's own threshold


class _Wide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.seen: list[bool] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(_is_whole(self.layer.weight))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.ones(4, _WIDTH))  # type: ignore[arg-type]


def _is_whole(weight: Any) -> bool:
    return weight.ds_status is ZeroParamStatus.AVAILABLE


def _fits(most: int | None, offload: Any) -> list[bool]:
    module = _Wide()
    with nullcontext() if most is None else patch.object(settings, "_WHOLE_ELEMENTS", most):
        trainer(zp.ZeroPlusStrategy(stage=3, offload=offload), max_epochs=1).fit(module)
    return module.seen


@pytest.mark.parametrize(
    ("most", "offload", "whole"),
    [(None, None, True), (_WIDTH * (_WIDTH + 1) - 1, None, False), (None, "cpu", False)],
)
def test_in_a_fit(ranks2: Any, most: int | None, offload: str | None, whole: bool) -> None:
    assert ranks2.run(_fits, most, offload) == [[whole] * 2] * 2


def _in_fabric() -> bool:
    fabric = Fabric(strategy=zp.ZeroPlusFabricStrategy(3), **everywhere())
    fabric.launch()
    net = nn.Linear(_WIDTH, _WIDTH)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    fabric.backward(model(torch.ones(1, _WIDTH)).sum())
    optimizer.step()
    return _is_whole(net.weight)


def test_in_fabric(ranks2: Any) -> None:
    assert ranks2.run(_in_fabric) == [True] * 2
