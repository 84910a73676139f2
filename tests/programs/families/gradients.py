"""Gradients read, changed, replaced and dropped by hand; parameters without one."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.programs.base import Manual, Regression, TwoParts, step
from tests.programs.program import program
from tests.programs.run import Run


@program(on_three_ranks=True)
class clip_grad_norm_by_hand(Manual):
    """`torch.nn.utils.clip_grad_norm_` between backward and step; the norm is logged."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05))
        step(self.optimizers())


@program()
class clip_grad_value_by_hand(Manual):
    """`torch.nn.utils.clip_grad_value_` after two backwards."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for part in (0, 1):
            self.manual_backward(F.mse_loss(self(batch[0][part::2]), batch[1][part::2]))
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.02)
        step(self.optimizers())


@program(on_three_ranks=True)
class clip_in_hook(Regression):
    """`configure_gradient_clipping` calls torch's function."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)


@program(on_three_ranks=True)
class scaled_gradient(Manual):
    """`p.grad.mul_(0.5)` for a layer."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for param in self.net[0].parameters():  # type: ignore[index]
            param.grad.mul_(0.5)  # type: ignore[union-attr]
        step(self.optimizers())


@program(trainer={"accumulate_grad_batches": 2})
class scaled_before_the_step(Regression):
    """`on_before_optimizer_step` divides the accumulated gradient by a number of its own."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            param.grad.div_(3.0)  # type: ignore[union-attr]


@program(trainer={"max_epochs": 2})
class dropped_gradient(Regression):
    """DINO: `p.grad = None` for the last layer in the first epoch, with AdamW."""

    def on_after_backward(self) -> None:
        if self.current_epoch == 0:
            for param in self.net[2].parameters():  # type: ignore[index]
                param.grad = None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, eps=1e-4)


@program(on_three_ranks=True)
class pcgrad(Manual):
    """PCGrad: the gradients of two tasks, read, projected, and assigned to `p.grad`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, tasks = self.optimizers(), []
        out = self(batch[0])
        for columns in (slice(0, 2), slice(2, 4)):
            optimizer.zero_grad()
            self.manual_backward(F.mse_loss(out[:, columns], batch[1][:, columns]), retain_graph=columns.start == 0)
            tasks.append([param.grad.clone() for param in self.parameters()])  # type: ignore[union-attr]
        dot = sum(((a * b).sum() for a, b in zip(*tasks, strict=True)), torch.zeros((), device=self.device))
        size = sum((a.square().sum() for a in tasks[0]), torch.zeros((), device=self.device))
        for param, first, second in zip(self.parameters(), *tasks, strict=True):
            param.grad = first + second - dot.clamp(max=0) / size * first
        self.log("dot", dot)
        step(optimizer)


@program()
class gradient_noise(Manual):
    """Noise that is the same on all ranks is added to every gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        generator = torch.Generator().manual_seed(batch_idx)
        for param in self.parameters():
            noise = torch.randn(param.shape, generator=generator).to(self.device)
            param.grad.add_(noise, alpha=0.01)  # type: ignore[union-attr]
        step(self.optimizers())


@program(on_three_ranks=True)
class lightning_grad_norm(Regression):
    """Lightning's `grad_norm` of a layer, logged before the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.net, norm_type=2))


@program(trainer={"gradient_clip_val": 0.05})
class norm_before_and_after_clipping(Regression):
    """The norm after the backward and, in the optimizer's hook, before Lightning clips."""

    def norm(self) -> Tensor:
        return torch.nn.utils.get_total_norm([param.grad for param in self.parameters() if param.grad is not None])

    def on_after_backward(self) -> None:
        self.log("after_backward", self.norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("before_step", self.norm())


@program()
class centralized_gradient(Manual):
    """Gradient centralization: a row's mean is subtracted, which needs whole rows."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for param in self.parameters():
            if param.grad is not None and param.grad.dim() > 1:
                param.grad -= param.grad.mean(1, keepdim=True)
        step(self.optimizers())


@program()
class sign_descent(Manual):
    """`p.grad = p.grad.sign()`, one bit of each element."""

    lr = 0.01

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for param in self.parameters():
            param.grad = param.grad.sign()  # type: ignore[union-attr]
        step(self.optimizers())


@program()
class gradient_between_backwards(Manual):
    """The gradient is changed between two backwards that add up."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(F.mse_loss(self(batch[0])[:, :2], batch[1][:, :2]))
        for param in self.parameters():
            param.grad *= 0.5  # type: ignore[operator]
        self.manual_backward(F.mse_loss(self(batch[0])[:, 2:], batch[1][:, 2:]))
        step(self.optimizers())


@program(reference="single")
class clipped_in_a_window(Manual):
    """Two backwards in `coalesce()`, then torch's clipping."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.coalesce() if hasattr(strategy, "coalesce") else contextlib.nullcontext():
            for columns in (slice(0, 2), slice(2, 4)):
                self.manual_backward(F.mse_loss(self(batch[0])[:, columns], batch[1][:, columns]))
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05))
        step(self.optimizers())


@program(trainer={"gradient_clip_val": 0.05})
class clipped_and_read_at_times(Regression):
    """Lightning clips; only before every other step somebody has looked at the gradients."""

    def on_after_backward(self) -> None:
        if self.global_step % 2 == 0:
            norms = [param.grad.norm() for param in self.parameters() if param.grad is not None]
            self.log("norm", torch.stack(norms).norm())


def _clip_adaptively(module: nn.Module) -> None:
    for param in module.parameters():
        limit = 0.01 * param.detach().norm().clamp(min=1e-3)
        param.grad.mul_((limit / param.grad.norm()).clamp(max=1.0))  # type: ignore[union-attr]


@program()
class adaptive_clipping(Manual):
    """Adaptive gradient clipping compares a gradient's norm with its weight's."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        _clip_adaptively(self.net)
        step(self.optimizers())


@program()
class adaptive_clipping_gathered(Manual):
    """The same within `zp.gathered`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        with zp.gathered(self.net):
            _clip_adaptively(self.net)
        step(self.optimizers())


@program(on_three_ranks=True)
class tensor_hook(Regression):
    """`param.register_hook`, set in `__init__`, scales a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda grad: 0.25 * grad)  # type: ignore[index]


@program()
class post_accumulate_hook(Regression):
    """`register_post_accumulate_grad_hook`, set in `__init__`, scales a gradient in place."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_post_accumulate_grad_hook(self.scale)  # type: ignore[index]

    @staticmethod
    def scale(param: Tensor) -> None:
        param.grad.mul_(0.25)  # type: ignore[union-attr]


@program()
class module_backward_hook(Regression):
    """`register_full_backward_hook` scales what flows back into a layer, and logs it."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].register_full_backward_hook(self.halve)  # type: ignore[index]

    def halve(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        self.log("flow", grad_output[0].norm(), sync_dist=True)
        return (grad_input[0] / 2,)


@program(reference="ddp_find_unused_parameters_true", on_three_ranks=True)
class frozen_between_backward_and_step(TwoParts):
    """Backward of D, `D.requires_grad_(False)`, backward of G through D, one step for both."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"d": nn.Linear(8, 4), "g": nn.Linear(8, 8)})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        d, g = self.net["d"], self.net["g"]  # type: ignore[index]
        self.manual_backward(F.mse_loss(d(batch[0]), batch[1]))
        d.requires_grad_(False)
        self.manual_backward(F.mse_loss(d(g(batch[0])), batch[1]))
        step(self.optimizers())
        d.requires_grad_(True)


@program()
class autograd_grad_is_no_backward(Manual):
    """`torch.autograd.grad` for a statistic, then a step without any gradient: nothing moves."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        if batch_idx % 2:
            grads = torch.autograd.grad(loss, list(self.net.parameters()))
            self.log("statistic", sum(grad.norm() for grad in grads), sync_dist=True)
        else:
            self.manual_backward(loss)
        step(self.optimizers())


@program(reference="single")
class autograd_grad_in_a_window(Manual):
    """`torch.autograd.grad` within `coalesce(backwards=2)` does not count."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.coalesce(backwards=2) if hasattr(strategy, "coalesce") else contextlib.nullcontext():
            self.manual_backward(self.loss(batch))
            torch.autograd.grad(self.loss(batch), list(self.net.parameters()))
            self.manual_backward(self(batch[0]).square().mean())
        step(self.optimizers())


class _Alternating(TwoParts):
    """Adam with decay over two networks, of which a batch uses one."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.use("ab"[batch_idx % 2], batch))
        step(self.optimizers())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.1, eps=1e-4)


@program(reference="ddp_find_unused_parameters_true", on_three_ranks=True)
class gan_with_one_optimizer(_Alternating):
    """Generator and discriminator take turns in one AdamW: who has no gradient stays, with its moments."""


@program(reference="ddp_find_unused_parameters_true")
class td3(_Alternating):
    """TD3: the critic in every batch, the actor in every second, through the critic, whose gradients are dropped."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"actor": nn.Linear(8, 4), "critic": nn.Linear(12, 1)})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, actor, critic = self.optimizers(), self.net["actor"], self.net["critic"]  # type: ignore[index]
        q = critic(torch.cat(batch, 1))
        self.manual_backward(F.mse_loss(q, batch[1].sum(1, keepdim=True)))
        step(optimizer)
        if batch_idx % 2:
            critic.requires_grad_(False)
            self.manual_backward(-critic(torch.cat([batch[0], actor(batch[0])], 1)).mean())
            critic.requires_grad_(True)
            step(optimizer)
        self.log("q", q.mean(), sync_dist=True)


@program(reference="ddp_find_unused_parameters_true", on_three_ranks=True)
class layer_drop(Regression):
    """LayerDrop with Adam: a batch leaves a layer out, the same one on all ranks."""

    def build(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for index, layer in enumerate(self.net):  # type: ignore[arg-type]
            x = layer(x) if index == 3 else x if index == batch_idx % 3 else x + torch.tanh(layer(x))
        return F.mse_loss(x, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01, weight_decay=0.1, eps=1e-4)


@program(reference="ddp_find_unused_parameters_true", stays=("net.b.*",))
class never_used(TwoParts):
    """A network that no loss uses, with weight decay: it stays as it is."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.use("a", batch))
        step(self.optimizers())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.5)


@program(reference="ddp_find_unused_parameters_true")
def frozen_in_mid_training(run: Run) -> None:
    """`requires_grad_(False)` after an epoch, with Adam, whose moments would move it on; unfrozen after another."""

    class Freezes(Regression):
        def on_train_epoch_start(self) -> None:
            self.net[0].requires_grad_(self.current_epoch != 1)  # type: ignore[index]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.1)

    run.fit(Freezes(), run.loader(2), max_epochs=3)


@program(reference="ddp_find_unused_parameters_true")
class one_gradient_dropped_of_two(TwoParts):
    """Both networks have gradients; those of one are dropped by its own `zero_grad()`, with momentum and decay."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.use("a", batch) + self.use("b", batch))
        if batch_idx % 2:
            self.net["b"].zero_grad()  # type: ignore[index]
        step(self.optimizers())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=0.1)


@program()
class all_cleared_before_the_step(Manual):
    """`p.grad = None` for all, then a step, which changes nothing, in every other batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        if batch_idx % 2 == 0:
            for param in self.parameters():
                param.grad = None
            self.optimizers().step()
        else:
            step(self.optimizers())


@program(reference="single")
class wrong_gradients_assigned(Manual):
    """`param.grad` is assigned a tensor of another dtype, and of another shape, which torch refuses; then a step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        weight: Any = self.net[0].weight  # type: ignore[index]
        raised = 0.0
        for shape, dtype in (((16, 8), torch.float64), ((8, 16), torch.float32)):
            wrong = torch.zeros(shape, dtype=dtype, device=self.device)
            try:
                weight.grad = wrong
            except RuntimeError:
                raised += 1.0
        self.log("raised", raised, sync_dist=True)
        step(self.optimizers())


@program(reference="single")
class backward_without_a_graph(Manual):
    """`manual_backward` of a loss that was computed under `no_grad`, which torch refuses; then a batch as usual."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            loss = self.loss(batch)
        self.log_refusal(loss, "does not require grad")
        super().training_step(batch, batch_idx)
