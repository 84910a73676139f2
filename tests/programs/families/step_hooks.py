"""Hooks of the torch optimizer: `register_step_pre_hook` and `register_step_post_hook`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.programs.base import Manual, Regression, TwoParts, step
from tests.programs.fabric_base import fabric_program
from tests.programs.program import program
from tests.programs.run import Run


class _Hooked(Regression):
    """Hooks read whole gradients, and write whole weights, by the optimizer's groups and by the module."""

    def configure_optimizers(self) -> Any:
        return self.hooked(super().configure_optimizers())

    def hooked(self, optimizer: Any) -> Any:
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)
        return optimizer

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.div_(1 + param.grad.norm())

    @torch.no_grad()
    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.mul_(0.9 + 0.1 / (1 + param.norm()))
        self.net[0].bias.clamp_(-0.2, 0.2)  # type: ignore[index]


@program({"max_epochs": 2})
class step_hooks(_Hooked):
    """Automatic optimization: one hook comes before the forward of the closure, one writes weights after the step."""

    @torch.no_grad()
    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        super().before(optimizer, args, kwargs)
        for param in self.parameters():
            param.mul_(0.95)


@program()
class step_hooks_by_hand(_Hooked, Manual):
    """Manual optimization: gradients are normalized by their norms before the step, weights shrunk after it."""


@program(precision="16-mixed")
class low_step_hooks(_Hooked, Manual):
    """The same in 16-mixed: the hooks see gradients without their loss scale."""


@program(reference="ddp_find_unused_parameters_true")
class step_hooks_of_two(_Hooked, TwoParts):
    """Two optimizers, the first with hooks, the second with one that is removed after two batches."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for name, optimizer in zip("ab", self.optimizers(), strict=True):
            self.manual_backward(F.mse_loss(self.net[name](batch[0]), batch[1]))  # type: ignore[index]
            step(optimizer)

    @torch.no_grad()
    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for param in self.net["b"].parameters():  # type: ignore[index]
            param.mul_(1 + 0.1 * param.norm())

    def configure_optimizers(self) -> Any:
        first, second = (torch.optim.AdamW(self.net[name].parameters(), 0.01) for name in "ab")  # type: ignore[index]
        self.handle = second.register_step_post_hook(lambda *unused: self.log("steps", 1.0, reduce_fx="sum"))
        return self.hooked(first), second

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.handle.remove()


@fabric_program()
def fabric_step_hooks(run: Run) -> None:
    """Hooks under Fabric, with and without a closure."""
    fabric = run.fabric()
    torch.manual_seed(0)
    module = _Hooked()
    run.compare(module.net)
    optimizer = module.configure_optimizers()
    model, optimizer = fabric.setup(module.net, optimizer)
    for index, (x, y) in enumerate(run.loader()):

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            fabric.backward(loss)
            return loss

        if index % 2:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
