"""Parameters that the module has kept since `__init__`, in lists and closures, and what it has set on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.programs.base import Manual, Regression
from tests.programs.program import program
from tests.programs.run import Run


class _Kept(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.kept = list(self.net.parameters())
        weights = [param for param in self.kept if param.dim() > 1]
        self.penalty = lambda: sum(weight.square().sum() for weight in weights)


@program()
class penalty_of_kept_parameters(_Kept):
    """A penalty over weights in the loss, by a closure that was made in `__init__`."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.penalty()


@program()
class kept_parameters_clipped(_Kept):
    """Gradients are clipped and weights clamped, halved and logged through a list that was made in `__init__`."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.kept[:2], 0.1))
        self.kept[2].grad = self.kept[2].grad.sign()  # type: ignore[union-attr]

    @torch.no_grad()
    def on_train_batch_end(self, *unused: Any) -> None:
        for param in self.kept:
            param.clamp_(-0.3, 0.3)
        self.kept[0].data = self.kept[0].data * 0.9
        torch._foreach_mul_(self.kept[:2], 0.99)
        self.log("mean", self.kept[2].mean())


@program(reference="ddp_find_unused_parameters_true")
class kept_parameters_by_hand(_Kept, Manual):
    """`torch.autograd.grad` for a list that was made in `__init__`, whose last parameter is frozen after a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.kept[3].requires_grad_(batch_idx < 1)
        trained = [param for param in self.kept if param.requires_grad]
        grads = torch.autograd.grad(self.loss(batch), trained)
        self.log("steepest", torch.stack([grad.abs().max() for grad in grads]).max(), sync_dist=True)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@program(precision="bf16-mixed")
class low_kept_parameters(_Kept):
    """The penalty in bf16-mixed, with a hook that is set through the list when the fit begins."""

    def on_fit_start(self) -> None:
        self.kept[0].register_hook(lambda grad: 0.5 * grad)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.penalty()


@program()
def kept_parameters_twice(run: Run) -> None:
    """Two fits and a plain step of a module with such a list, and a validation between them."""
    module = _Kept()
    for _ in range(2):
        trainer = run.fit(module, run.loader(), run.loader(2))
        trainer.validate(module, run.loader(2), verbose=False)
    assert all(kept is param for kept, param in zip(module.kept, module.net.parameters(), strict=True))
    run.keep(norm=torch.stack([param.norm() for param in module.kept]).norm())


@program()
class attributes_of_parameters(Regression):
    """Attributes of parameters are set when the fit begins, updated before each step, and read in the loss."""

    def on_fit_start(self) -> None:
        for index, param in enumerate(self.parameters()):
            param.factor = index + 1.0  # type: ignore[attr-defined]

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        seen = sum(param.factor * getattr(param, "average", 0.0) for param in self.parameters())
        self.log("seen", seen)
        return loss * (1 + 0.1 * seen)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            assert param.grad is not None
            param.average = 0.9 * getattr(param, "average", 0.0) + float(param.grad.norm())  # type: ignore[attr-defined]
            param.grad.mul_(param.factor / (1 + param.average))  # type: ignore[attr-defined]


class _ChannelsLast(Regression):
    """Weights whose memory has another order, of which tensors were kept in `__init__`."""

    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.kept = [param.detach() for param in self.parameters()]

    def build(self) -> nn.Module:
        layers = (nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 4))
        return nn.Sequential(*layers)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("norm", torch.stack([each.norm() for each in self.kept]).sum())
        with torch.no_grad():
            for each in self.kept:
                each.mul_(0.95)


@program()
class kept_in_another_order(_ChannelsLast):
    """Tensors of weights in `channels_last` are kept in `__init__`, read and written after every batch."""
