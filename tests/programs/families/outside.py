"""Parameters that no optimizer has, although they are not frozen."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import nn

from tests.programs.base import Manual, Regression
from tests.programs.program import program


class _HeadOnly(Regression):
    """The optimizer has the last layer; the first one was not frozen."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2].parameters(), 0.1, momentum=0.9)  # type: ignore[index]


@program({"max_epochs": 2}, stays=("net.0.*",))
class outside_and_clipped(_HeadOnly):
    """The optimizer has the head alone: clipping by hand, over all parameters, counts what adds up in the others."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))
        self.log("clipped", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5))


@program({"gradient_clip_val": 0.1}, stays=("net.0.*",))
class outside_and_clipped_by_lightning(_HeadOnly):
    """The same with `gradient_clip_val`, which clips what the optimizer has."""


@program(stays=("net.0.*",))
class outside_by_hand(_HeadOnly, Manual):
    """The gradient of what no optimizer has is used by hand, after the step, and zeroed by the module at times."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for part in (slice(2), slice(2, 4)):
            self.manual_backward(F.mse_loss(self(batch[0][part]), batch[1][part]) / 2)
        optimizer.step()
        optimizer.zero_grad()
        first = self.net[0].weight  # type: ignore[index]
        self.log("norm", first.grad.norm())
        with torch.no_grad():
            self.net[2].weight.add_(first.grad.mean(), alpha=-0.1)  # type: ignore[index]
        if batch_idx == 1:
            self.zero_grad()
            assert first.grad is None
        if batch_idx == 2:
            first.grad = None


@program(precision="16-true", stays=("net.0.*",))
class low_outside(_HeadOnly, Manual):
    """The same in 16-true: the norm is that of gradients without a loss scale."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.2)
        optimizer.step()


@program(reference="ddp_find_unused_parameters_true", stays=("net.0.*", "net.2.*"))
class outside_on_one_rank(Manual):
    """Each rank's loss uses another network; the optimizer has neither, but a third one, which follows them."""

    def build(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.zero_grad()
        mine = self.net[2 * (self.global_rank % 2)]  # type: ignore[index]
        self.manual_backward(F.mse_loss(mine(batch[0]) + self.net[1](batch[0]), batch[1]))  # type: ignore[index]
        grads = [self.net[index].weight.grad for index in (0, 2)]  # type: ignore[index]
        self.net[1].weight.grad.add_(grads[0] - grads[1])  # type: ignore[index]
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[1].parameters(), 0.1)  # type: ignore[index]
