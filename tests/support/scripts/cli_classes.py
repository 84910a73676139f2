"""Classes that the configs of the CLI tests name, and a user's own LightningCLI."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

import lightning_zeroplus  # noqa: F401  # the one import
from tests.support.training import loader, weights


class Small(pl.LightningModule):
    """Two backwards per step.

    Args:
        width: Width of the hidden layer.
        tampers: Damage a gradient before the step.
    """

    def __init__(self, width: int = 32, tampers: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.tampers = tampers
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            self.manual_backward(nn.functional.cross_entropy(self.net(x), y))
        if self.tampers:
            self.net[0].weight.grad.zero_()
        optimizer.step()
        optimizer.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def train_dataloader(self) -> Any:
        return loader(64)

    def val_dataloader(self) -> Any:
        return loader(32)

    test_dataloader = predict_dataloader = val_dataloader

    def on_train_end(self) -> None:
        total = float(weights(self).double().sum())
        if self.trainer.is_global_zero:
            name = type(self.trainer.strategy).__name__
            print(f"trained with {name} on {self.trainer.world_size}: {total:.4f} in {self.trainer.global_step}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


if __name__ == "__main__":
    LightningCLI(Small, save_config_callback=None)
