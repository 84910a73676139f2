"""LightningModules that programs are built on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.program import program


class Regression(pl.LightningModule):
    """Automatic optimization; subclasses override what they are about."""

    lr = 0.1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = self.build()

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


class Unfreezes(Regression):
    """The first layer is frozen when the optimizer is made, and unfrozen after an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)  # type: ignore[index]

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch >= 1)  # type: ignore[index]


class Swaps(Regression):
    """Moving averages by hand are the weights in validation: swapped in, and out, by `p.data = ...`."""

    def take(self, param: nn.Parameter) -> Tensor:
        """The weight's values, which are swapped back."""
        raise NotImplementedError

    def on_fit_start(self) -> None:
        self.averages = [param.detach().clone() for param in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for average, param in zip(self.averages, self.parameters(), strict=True):
            average.lerp_(self.take(param), 0.5)

    def on_validation_epoch_start(self) -> None:
        self.backups = [self.take(param) for param in self.parameters()]
        for average, param in zip(self.averages, self.parameters(), strict=True):
            param.data = average

    def on_validation_epoch_end(self) -> None:
        for backup, param in zip(self.backups, self.parameters(), strict=True):
            param.data = backup


class Manual(Regression):
    """Manual optimization; subclasses override ``training_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss, sync_dist=True)

    def log_refusal(self, loss: Tensor, says: str) -> None:
        """Log whether torch refuses a backward, by an error with these words."""
        raised = False
        try:
            self.manual_backward(loss)
        except RuntimeError as error:
            assert says in str(error), error
            raised = True
        self.log("raised", float(raised), sync_dist=True)


class TwoParts(Manual):
    """Two networks, which parts of a step use."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})

    def use(self, name: str, batch: Any) -> Tensor:
        """The loss of one of them."""
        return F.mse_loss(self.net[name](batch[0]), batch[1])  # type: ignore[index]


def step(optimizer: Any) -> None:
    """Step and zero the gradients."""
    optimizer.step()
    optimizer.zero_grad()


def trains(family: str, name: str, what: str, layers: Callable[[], nn.Module], **details: Any) -> None:
    """Make a program that trains a network on inputs ``(rows, 8)`` and targets ``(rows, 4)``.

    Args:
        family: The ``__name__`` of the module that the program is of.
        name: The program's.
        what: The program's line in the table.
        layers: Makes the network.
        **details: As for ``program``.
    """

    class Trains(Regression):
        def build(self) -> nn.Module:
            return layers()

    Trains.__name__, Trains.__doc__, Trains.__module__ = name, what, family
    program(**details)(Trains)
