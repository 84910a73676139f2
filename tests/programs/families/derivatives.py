"""Backwards that users write themselves: overridden, partial, higher derivatives, and `torch.func`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tests.programs.base import Manual, Regression, TwoParts, step
from tests.programs.program import program


@program()
class backward_overridden(Regression):
    """`def backward(self, loss): loss.backward()`, as Lightning's documentation has it."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


@program()
class backward_overridden_with_the_loss_only(Regression):
    """`backward(self, loss)` without further arguments."""

    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        loss.backward()


@program(reference="single")
class manual_backward_of_inputs(TwoParts):
    """`manual_backward(loss, inputs=...)`: only one network is given its gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.use("a", batch) + self.use("b", batch)
        self.manual_backward(loss, inputs=list(self.net["a"].parameters()), retain_graph=True)  # type: ignore[index]
        self.manual_backward(loss)
        step(self.optimizers())


@program()
class create_graph(Manual):
    """`manual_backward(loss, create_graph=True)`, and the norm of the input's gradient differentiated."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0].clone().requires_grad_()
        loss = F.mse_loss(self(x), batch[1])
        self.manual_backward(loss, create_graph=True, inputs=[x])
        self.manual_backward(loss + x.grad.square().sum())  # type: ignore[union-attr]
        step(self.optimizers())


@program(precision="16-true")
class create_graph_in_fp16(create_graph):
    """`create_graph=True` in 16-true: these gradients have no loss scale."""


@program(reference="single")
class create_graph_of_everything(Manual):
    """`manual_backward(loss, create_graph=True)` into all parameters, and a second backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss, create_graph=True)
        self.manual_backward(0.5 * loss)
        step(self.optimizers())


@program()
class pinn(Manual):
    """A physics-informed network: second derivatives with respect to the input in the loss."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0].clone().requires_grad_()
        u = self(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
        loss = (ddu[:, 0] + du[:, 1] - batch[1][:, 0]).square().mean() + u.square().mean()
        self.manual_backward(loss)
        step(self.optimizers())


@program(reference="single")
class r1_penalty(Manual):
    """R1: the gradient of a critic's output on real data, squared, in a backward of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(F.softplus(-self(batch[0])).mean())
        if batch_idx % 2 == 0:
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
            self.manual_backward(5 * slope.square().sum(1).mean())
        step(self.optimizers())


@program()
class walked_again_by_autograd_grad(Manual):
    """`torch.autograd.grad(loss, x, retain_graph=True)`, then `manual_backward(loss)`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0].clone().requires_grad_()
        loss = F.mse_loss(self(x), batch[1])
        (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
        self.log("slope", slope.norm(), sync_dist=True)
        self.manual_backward(loss)
        step(self.optimizers())


@program(reference="single")
class bare_backward_retained(Manual):
    """`loss.backward(retain_graph=True)`, twice."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        loss.backward(retain_graph=True)
        loss.backward()
        step(self.optimizers())


@program(reference="single")
class bare_backward_with_a_reentrant_checkpoint(Manual):
    """`loss.backward()` through `checkpoint(use_reentrant=True)`."""

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        return F.mse_loss(checkpoint(self.net, x, use_reentrant=True), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()
        step(self.optimizers())


@program()
class regularized_weights(Regression):
    """An L2 penalty over `self.parameters()` in the loss."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * sum(param.square().sum() for param in self.parameters())


@program()
class uses_a_weight_of_its_head(Regression):
    """ArcFace: the parent normalizes `self.head.weight` and uses it itself."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"trunk": nn.Linear(8, 6), "head": nn.Linear(6, 4, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        features = self.net["trunk"](x).tanh()  # type: ignore[index]
        return F.linear(F.normalize(features), F.normalize(self.net["head"].weight))  # type: ignore[index]


@program()
class functional_call(Regression):
    """`torch.func.functional_call` with the module's own parameters, scaled."""

    def forward(self, x: Tensor) -> Tensor:
        scaled = {name: 0.9 * param for name, param in self.net.named_parameters()}
        return torch.func.functional_call(self.net, scaled, (x,))


@program()
class per_sample_gradients(Manual):
    """`torch.func.vmap(grad(...))`: the largest norm of per-sample gradients is logged."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        params = {name: param.detach() for name, param in self.net.named_parameters()}

        def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(torch.func.functional_call(self.net, params, (x[None],)), y[None])

        slopes = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, *batch)
        self.log("largest", max(slope.flatten(1).norm(dim=1).max() for slope in slopes.values()), sync_dist=True)
        self.manual_backward(self.loss(batch))
        step(self.optimizers())


@program()
class private_gradients(Manual):
    """DP-SGD: per-sample gradients by `torch.func`, clipped, averaged over all ranks, and put into `param.grad`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        params = dict(self.net.named_parameters())

        def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(torch.func.functional_call(self.net, params, (x[None],)), y[None])

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, *batch)
        norms = torch.stack([slope.flatten(1).norm(dim=1) for slope in each.values()]).norm(dim=0)
        kept = (0.5 / norms).clamp(max=1)
        for name, param in params.items():
            mean = torch.einsum("b,b...->...", kept, each[name]) / len(kept)
            param.grad = self.trainer.strategy.reduce(mean.detach(), reduce_op="mean")
        step(self.optimizers())


@program()
class slopes_along_weights(Manual):
    """`torch.func.jvp` along a direction of all weights, `vjp` and a `vmap` over rows of a weight, which are logged."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        params = {name: param.detach() for name, param in self.net.named_parameters()}
        along = {name: torch.ones_like(param) for name, param in params.items()}

        def loss(params: Any) -> Tensor:
            return F.mse_loss(torch.func.functional_call(self.net, params, (batch[0],)), batch[1])

        slope = torch.func.jvp(loss, (params,), (along,))[1]
        (back,) = torch.func.vjp(loss, dict(self.net.named_parameters()))[1](torch.tensor(1.0, device=self.device))
        rows = torch.func.vmap(torch.dot, in_dims=(0, None))(self.net[0].weight, batch[0][0])  # type: ignore[index]
        self.log("slope", slope, sync_dist=True)
        self.log("back", sum(part.square().sum() for part in back.values()), sync_dist=True)
        self.log("rows", rows.square().sum(), sync_dist=True)
        self.manual_backward(self.loss(batch))
        step(self.optimizers())


@program()
class one_inner_step(Manual):
    """MAML: a step on one half of a batch, by hand and differentiable; the loss of the other half behind it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (x, other), (y, wanted) = batch[0].chunk(2), batch[1].chunk(2)
        params = dict(self.net.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(self.net, params, (x,)), y)
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {name: p - 0.1 * grad for (name, p), grad in zip(params.items(), grads, strict=True)}
        self.manual_backward(F.mse_loss(torch.func.functional_call(self.net, fast, (other,)), wanted))
        step(self.optimizers())


@program(trainer={"accumulate_grad_batches": 2})
class accumulated_penalty(Regression):
    """A penalty over weights in the loss of each micro-batch; a tensor hook reads a weight, too."""

    def on_fit_start(self) -> None:
        weight: Any = self.net[0].weight  # type: ignore[index]
        weight.register_hook(lambda grad: grad + 0.1 * weight.detach())

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * sum(param.square().sum() for param in self.parameters())


class _Smooth(Regression):
    """Layers that torch and the engines differentiate in different ways."""

    def build(self) -> nn.Module:
        filters = nn.Sequential(nn.Unflatten(-1, (1, 8)), nn.Conv1d(1, 2, 3), nn.Flatten(-2))
        return nn.Sequential(filters, nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 6, bias=False), nn.Linear(6, 4))


@program()
class slopes_by_forward_mode(_Smooth):
    """`torch.func.jvp` through the network: the slope along the input is part of the loss."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out, slope = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))
        return F.mse_loss(out, y) + 0.1 * slope.square().mean()


@program()
class dual_numbers(_Smooth):
    """`torch.autograd.forward_ad`: as `torch.func.jvp`, by hand."""

    def loss(self, batch: Any) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(batch[0], torch.ones_like(batch[0]))
            out, slope = forward_ad.unpack_dual(self(dual))
            return F.mse_loss(out, batch[1]) + 0.1 * slope.square().mean()


@program()
class slopes_per_sample(_Smooth):
    """A network for differential equations: `vmap(grad(...))` and `vmap(jacrev(...))` with respect to the input."""

    def loss(self, batch: Any) -> Tensor:
        def energy(x: Tensor) -> Tensor:
            return self.net(x).square().sum()

        slopes = torch.func.vmap(torch.func.grad(energy))(batch[0])
        jacobians = torch.func.vmap(torch.func.jacrev(self.net))(batch[0])
        return super().loss(batch) + 0.1 * slopes.square().mean() + 0.1 * jacobians.square().mean()


@program()
class curvature(_Smooth):
    """`torch.func.hessian` of the output with respect to an input: forward over reverse."""

    def loss(self, batch: Any) -> Tensor:
        def energy(x: Tensor) -> Tensor:
            return self.net(x).square().sum()

        return super().loss(batch) + 0.1 * torch.func.hessian(energy)(batch[0][0]).diagonal().square().sum()


# -- backwards of what was computed with other weights ----------------------------------------------------------------

_CHANGED = "modified by an inplace operation"


@program(reference="single")
class backward_after_the_step(Manual):
    """A step between a forward and its backward, which autograd refuses: its graph has saved other weights."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.loss(batch), self.loss(batch)
        self.manual_backward(first)
        step(self.optimizers())
        self.log_refusal(second, _CHANGED)
        self.optimizers().zero_grad()  # type: ignore[union-attr]


@program(reference="single")
class backward_after_a_write(Manual):
    """The same with a write to all weights under `no_grad`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        with torch.no_grad():
            for param in self.net.parameters():
                param.mul_(0.9)
        self.log_refusal(loss, _CHANGED)
        super().training_step(batch, batch_idx)


@program(reference="single")
class backward_after_a_write_to_data(Manual):
    """The same with a write to `param.data`, which autograd does not count: the backward has the new weights."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        for param in self.net.parameters():
            param.data.mul_(0.9)
        self.manual_backward(loss)
        step(self.optimizers())


@program(reference="ddp_find_unused_parameters_true")
class backward_after_a_step_of_the_other(TwoParts):
    """The losses of two networks are computed first; then each has its backward and the step of its optimizer."""

    lr = 0.02

    def training_step(self, batch: Any, batch_idx: int) -> None:
        losses = {name: self.use(name, batch) for name in "ab"}
        for loss, optimizer in zip(losses.values(), self.optimizers(), strict=True):  # type: ignore[arg-type]
            self.manual_backward(loss)
            step(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[name].parameters(), self.lr) for name in "ab"]  # type: ignore[index]


@program(reference="single")
class backward_after_a_step_without_gradient(Manual):
    """The same of one network, whose last layer has no gradient in the first backward: autograd takes the second."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.net[1](self.net[0](batch[0]))  # type: ignore[index]
        out = self.net[2](hidden.detach())  # type: ignore[index]
        self.manual_backward(hidden.square().mean())
        step(self.optimizers())
        self.manual_backward(F.mse_loss(out, batch[1]))
        step(self.optimizers())
