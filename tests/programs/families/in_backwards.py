"""What hooks do in the middle of a backward, and backwards of other kinds between those of a window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.programs.base import Manual, Regression, step
from tests.programs.program import Refusal, program


class _Window(Manual):
    """Three backwards in `no_sync()`, and one after them."""

    count = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            for self.count in range(3):
                self.differentiate(self.loss(batch))
        self.count = 3
        self.after(batch)
        self.manual_backward(self.loss(batch))
        self.log_norm()
        step(self.optimizers())

    def differentiate(self, loss: Tensor) -> None:
        self.manual_backward(loss)

    def after(self, batch: Any) -> None:
        """After the window."""

    def log_norm(self) -> None:
        norms = [param.grad.norm() for param in self.parameters() if param.grad is not None]
        self.log("norm", torch.stack(norms).norm(), sync_dist=True)


class _InHook(_Window):
    """A hook of the last layer's weight acts in the third backward."""

    acts_in = 2

    def on_train_start(self) -> None:
        self.first, self.last = self.net[0], self.net[2]  # type: ignore[index]
        self.last.weight.register_hook(self.called)

    def called(self, grad: Tensor) -> None:
        if self.count == self.acts_in:
            with torch.enable_grad():
                self.act()

    def act(self) -> None:
        raise NotImplementedError


@program()
class zeroed_in_a_hook(_InHook):
    """A tensor hook in a window calls `self.zero_grad()`: what has come by then is lost."""

    def act(self) -> None:
        self.zero_grad()


@program()
class zeroed_by_the_optimizer_in_a_hook(_InHook):
    """The same with `optimizer.zero_grad()`."""

    def act(self) -> None:
        self.optimizers().zero_grad()


@program()
class zeroed_in_the_last_backward(_InHook):
    """The hook of a bias calls `self.zero_grad()` in the backward after a window, before any gradient has come."""

    acts_in = 3

    def on_train_start(self) -> None:
        self.net[2].bias.register_hook(self.called)  # type: ignore[index]

    def act(self) -> None:
        self.zero_grad()


@program()
class one_dropped_in_a_hook(_InHook):
    """A tensor hook in a window drops the gradient of a layer whose turn comes later, and deletes one that has come."""

    def act(self) -> None:
        self.first.weight.grad = None
        del self.last.bias.grad


@program()
class assigned_in_a_hook(_InHook):
    """A tensor hook in a window assigns gradients of a layer whose turn comes later."""

    def act(self) -> None:
        self.first.weight.grad = torch.full_like(self.first.weight, 0.1)
        self.first.bias.grad = self.first.bias.grad * 0.5


@program()
class assigned_in_the_first_backward(_InHook):
    """The same in the first backward of a window, where there is no gradient yet."""

    acts_in = 0

    def act(self) -> None:
        self.first.weight.grad = torch.full_like(self.first.weight, 0.1)
        self.log("none", float(self.first.bias.grad is None), sync_dist=True)


@program()
class looked_at_in_a_hook(_InHook):
    """A tensor hook in a window reads a gradient that has come, and one whose turn comes later, and halves that."""

    def act(self) -> None:
        self.log("read", self.first.weight.grad.norm() + self.last.bias.grad.norm(), sync_dist=True)
        self.first.weight.grad.mul_(0.5)


@program()
class frozen_in_a_hook(_InHook):
    """A tensor hook in a window freezes a layer whose turn comes later."""

    def act(self) -> None:
        self.first.weight.requires_grad_(False)

    def after(self, batch: Any) -> None:
        self.first.weight.requires_grad_(True)


@program()
class hooked_in_a_hook(_InHook):
    """A tensor hook in a window sets hooks on a layer whose turn comes later; one of them removes itself."""

    def act(self) -> None:
        once = self.first.weight.register_hook(lambda grad: once.remove() or 2 * grad)
        self.handles = [
            self.first.weight.register_hook(lambda grad: 3 * grad),
            self.first.bias.register_post_accumulate_grad_hook(_halve),
        ]

    def after(self, batch: Any) -> None:
        for handle in self.handles:
            handle.remove()


def _halve(param: Tensor) -> None:
    param.grad.mul_(0.5)  # type: ignore[union-attr]


@program()
class raises_in_a_hook(_InHook):
    """A tensor hook in a window raises; the error is caught, and the window begins anew."""

    def act(self) -> None:
        raise ValueError("not this batch")

    def differentiate(self, loss: Tensor) -> None:
        try:
            super().differentiate(loss)
        except ValueError:
            self.raised = True

    def after(self, batch: Any) -> None:
        self.zero_grad()
        self.manual_backward(0.5 * self.loss(batch))


@program()
class backward_in_a_hook(_InHook):
    """A tensor hook in a window calls `backward()` of a penalty, and asks for the derivative of another one."""

    def act(self) -> None:
        (0.1 * self.first.weight.square().sum()).backward()
        (grad,) = torch.autograd.grad(0.1 * self.first.weight.pow(3).sum(), self.first.weight)
        self.log("derivative", grad.norm(), sync_dist=True)


@program()
class other_backwards_in_a_window(_Window):
    """A window with `loss.backward()` of a loss, of a penalty on weights, and `torch.autograd.grad`."""

    def differentiate(self, loss: Tensor) -> None:
        if self.count == 1:
            grads = torch.autograd.grad(loss, list(self.parameters()), retain_graph=True)
            self.log("first", grads[0].norm(), sync_dist=True)
            loss.backward()
            (0.1 * self.net[0].weight.square().sum()).backward()  # type: ignore[index, union-attr]
        else:
            self.manual_backward(loss)


@program()
class some_inputs_in_a_window(_Window):
    """A window with two backwards of one graph, of which one is for some parameters only."""

    def differentiate(self, loss: Tensor) -> None:
        self.manual_backward(loss, inputs=list(self.net[0].parameters()), retain_graph=True)  # type: ignore[index]
        self.manual_backward(0.5 * loss)


class _Twice(_InHook):
    """A hook acts in the second of two backwards, outside of any window."""

    acts_in = 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for self.count in range(2):
            self.manual_backward(self.loss(batch))
        self.log_norm()
        step(self.optimizers())


_PARTS = Refusal("RuntimeError", r"`param.grad` was assigned in a hook within a backward")
_SHARDED = dict.fromkeys(("stage2", "stage2_o*", "stage3", "stage3_o*"), _PARTS)


@program(refused=_SHARDED)
class dropped_in_the_second_backward(_Twice):
    """A tensor hook in the second backward of a step drops the gradient of a layer whose turn comes later."""

    def act(self) -> None:
        self.first.weight.grad = None


@program(refused=_SHARDED)
class assigned_in_the_second_backward(_Twice):
    """The same, which assigns that gradient."""

    def act(self) -> None:
        self.first.weight.grad = torch.full_like(self.first.weight, 0.1)


@program()
class assigned_in_the_only_backward(assigned_in_the_second_backward):
    """The same in the only backward of a step."""

    acts_in = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.log_norm()
        step(self.optimizers())


@program(trainer={"accumulate_grad_batches": 3}, refused=_SHARDED)
class dropped_while_accumulating(Regression):
    """A tensor hook drops the gradient of a layer whose turn comes later; `accumulate_grad_batches=3`."""

    def on_train_start(self) -> None:
        self.net[2].weight.register_hook(self.called)  # type: ignore[index]

    def called(self, grad: Tensor) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx % 3 == 1:
            self.net[0].weight.grad = None  # type: ignore[index]
