"""Optimizers that are stepped without Lightning's wrapper."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tests.programs.base import Manual, Regression, TwoParts
from tests.programs.fabric_base import backward, fabric_program, make_net
from tests.programs.program import program
from tests.programs.run import Run


class _Twice(Manual):
    """Two backwards per step, of an optimizer that subclasses choose."""

    def stepped(self) -> Any:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.stepped()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) / 2)
        self.manual_backward(self.net(batch[0]).square().mean())
        optimizer.step()

    def configure_optimizers(self) -> Any:
        self.own = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
        return self.own


@program()
class without_wrapper(_Twice):
    """`self.optimizers(use_pl_optimizer=False)` in manual optimization."""

    def stepped(self) -> Any:
        return self.optimizers(use_pl_optimizer=False)


@program()
class wrapped_optimizer(_Twice):
    """`self.optimizers().optimizer` is stepped."""

    def stepped(self) -> Any:
        return self.optimizers().optimizer  # type: ignore[union-attr]


@program()
class kept_by_the_module(_Twice):
    """The module steps the optimizer that it has kept in `configure_optimizers`."""

    def stepped(self) -> Any:
        return self.own


@program(precision="bf16-true")
class low_kept_by_the_module(kept_by_the_module):  # type: ignore[misc, valid-type]
    """The same in bf16."""


@program()
class kept_with_a_scheduler(_Twice):
    """The same with a scheduler, which wraps `step`."""

    def stepped(self) -> Any:
        return self.own

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@program(reference="ddp_find_unused_parameters_true")
class kept_pair(TwoParts):
    """A module that steps its two optimizers itself; the first takes a closure."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        def closure() -> Any:
            self.first.zero_grad()
            loss = self.use("a", batch)
            self.manual_backward(loss)
            return loss

        self.log("loss", self.first.step(closure), sync_dist=True)
        self.manual_backward(self.use("b", batch) + 0.1 * self.use("a", batch))
        self.second.step()
        self.second.zero_grad()

    def configure_optimizers(self) -> Any:
        self.first = torch.optim.SGD(self.net["a"].parameters(), self.lr)  # type: ignore[index]
        self.second = torch.optim.Adam(self.net["b"].parameters(), 0.02)  # type: ignore[index]
        return [self.first, self.second]


class _Scaled(Manual):
    def on_fit_start(self) -> None:
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**10, growth_interval=2)

    def overflowing(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (math.inf if batch_idx == 1 and self.global_rank == 0 else 1)


@program()
class scaler_of_the_optimizer(_Scaled):
    """torch's GradScaler in a module, with `unscale_`, clipping, and an overflow on one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers().optimizer  # type: ignore[union-attr]
        optimizer.zero_grad()
        self.manual_backward(self.scaler.scale(self.overflowing(batch, batch_idx)))
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        self.scaler.step(optimizer)
        self.scaler.update()
        self.log("scale", self.scaler.get_scale())


@program()
class scaler_of_the_wrapper(_Scaled):
    """The same without `unscale_`, by Lightning's wrapper."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.scaler.scale(self.overflowing(batch, batch_idx)))
        self.scaler.step(optimizer)
        self.scaler.update()
        self.log("scale", self.scaler.get_scale())


@program()
class stepped_in_a_hook(Regression):
    """Automatic optimization whose `optimizer_step` runs the closure and steps the optimizer itself."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        raw = getattr(optimizer, "optimizer", optimizer)
        raw.step(closure=optimizer_closure)


@fabric_program()
def fabric_steps_what_it_has_made(run: Run) -> None:
    """The loop steps the optimizers that it has made, and not what `fabric.setup` returns; one has a scheduler."""
    fabric, net = run.fabric(), make_net()
    run.compare(net)
    first, second = (torch.optim.Adam(net[index].parameters(), 0.02) for index in (0, 2))  # type: ignore[index]
    model, *_ = fabric.setup(net, first, second)
    scheduler = torch.optim.lr_scheduler.StepLR(second, 1, 0.5)
    for index, batch in enumerate(run.loader()):
        backward(fabric, model, batch)
        for optimizer in (first, second):
            optimizer.step()
        for optimizer in (first, second)[: 1 + index % 2]:
            optimizer.zero_grad()
        second.zero_grad()
        scheduler.step()
