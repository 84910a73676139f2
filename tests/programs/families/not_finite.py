"""Gradients that are infinite or NaN for a step, where no loss scale skips it: DDP does not skip it either."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.programs.base import Manual, Regression
from tests.programs.program import program

_BY_VALUE = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}


class _Explodes(Regression):
    """The gradient of one element is infinite on the last rank, in the second step."""

    factor = math.inf

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 1 and self.global_rank == self.trainer.world_size - 1:
            loss = loss + self.factor * self.net[2].bias[0]  # type: ignore[index]
        return loss


@program(_BY_VALUE)
class infinite_and_clipped_by_value(_Explodes):
    """An infinite gradient that `gradient_clip_algorithm="value"` makes finite."""


@program(_BY_VALUE, precision="bf16-true")
class low_infinite_and_clipped_by_value(_Explodes):
    """The same in bf16."""


class _Restores(_Explodes):
    """Goes back to the weights of the step before when some are not finite, and logs how many."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kept = {name: param.detach().clone() for name, param in self.named_parameters()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        broken = sum(int((~param.isfinite()).sum()) for param in self.parameters())
        self.log("broken", float(broken))
        if broken:
            with torch.no_grad():
                for name, param in self.named_parameters():
                    param.copy_(self.kept[name])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


@program()
class back_to_finite_weights(_Restores):
    """An infinite gradient makes one weight infinite, and the module goes back to the weights of the step before."""


@program(precision="bf16-true")
class low_back_to_finite_weights(_Restores):
    """The same in bf16."""

    lr = 0.5  # a step is large beside the rounding of the weights


@program({"gradient_clip_val": 0.5})
class infinite_and_clipped_by_norm(_Restores):
    """Clipping by an infinite norm makes the infinite gradient NaN, and the others zero."""


@program({"gradient_clip_val": 0.5})
class nan_and_clipped_by_norm(_Restores):
    """Clipping by a norm that is NaN makes all gradients NaN."""

    factor = math.nan


@program()
class infinite_for_one_optimizer(Manual):
    """One of two optimizers has an infinite gradient, which it clips by value; the other clips by norm."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward(self.loss(batch) + (math.inf * self.net[0].bias[1] if batch_idx == 1 else 0))  # type: ignore[index]
        self.clip_gradients(first, 0.5, "value")
        self.clip_gradients(second, 0.5, "norm")
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[index].parameters(), self.lr) for index in (0, 2)]  # type: ignore[index]
