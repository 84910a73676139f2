"""Methods as their papers' code writes them: layers with backwards of their own, searches, teachers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.programs.base import Manual, Regression, trains
from tests.programs.program import program


class _Equilibrium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def once(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.inner(z) + self.outer(x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(8):
                z = self.once(z, x)
        z = self.once(z, x)
        if not z.requires_grad:
            return z
        start = z.detach().requires_grad_()
        image = self.once(start, x)

        def solve(grad: Tensor) -> Tensor:
            solution = grad
            for _ in range(8):
                solution = torch.autograd.grad(image, start, solution, retain_graph=True)[0] + grad
            return solution

        z.register_hook(solve)
        return z


trains(
    __name__,
    "deep_equilibrium",
    "DEQ: a fixed point, whose hook solves another one by `torch.autograd.grad` in the backward.",
    lambda: nn.Sequential(_Equilibrium(), nn.Linear(8, 4)),
)


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, field: Callable[[Tensor], Tensor], y: Tensor, *params: Tensor) -> Tensor:
        ctx.field = field
        for _ in range(4):
            y = y + 0.25 * field(y)
        ctx.save_for_backward(y, *params)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (y, *params) = grads, ctx.saved_tensors
        sums = [torch.zeros_like(param) for param in params]
        for _ in range(4):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                slope = ctx.field(y)
                to_y, *to_params = torch.autograd.grad(slope, (y, *params), grad)
            y, grad = y - 0.25 * slope, grad + 0.25 * to_y
            sums = [total + 0.25 * each for total, each in zip(sums, to_params, strict=True)]
        return (None, grad, *sums)


class _Ode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return _Adjoint.apply(self.field, x, *self.field.parameters())  # type: ignore[no-any-return]


trains(
    __name__,
    "adjoint_method",
    "A neural ODE: all parameters are inputs of an `autograd.Function`, which integrates backwards.",
    lambda: nn.Sequential(nn.Linear(8, 8), _Ode(), nn.Linear(8, 4)),
)


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module) -> Tensor:
        first, second = x.chunk(2, -1)
        first = first + f(second)
        second = second + g(first)
        ctx.f, ctx.g = f, g
        ctx.save_for_backward(torch.cat([first, second], -1))
        return torch.cat([first, second], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        first, second = ctx.saved_tensors[0].chunk(2, -1)
        to_first, to_second = grads[0].chunk(2, -1)
        with torch.enable_grad():
            first = first.detach().requires_grad_()
            added = ctx.g(first)
            added.backward(to_second)
        to_first = to_first + first.grad
        with torch.enable_grad():
            second = (second - added).detach().requires_grad_()
            ctx.f(second).backward(to_first)
        return torch.cat([to_first, to_second + second.grad], -1), None, None


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return _Reversible.apply(x, self.f, self.g)  # type: ignore[no-any-return]


trains(
    __name__,
    "reversible",
    "RevNet: activations are computed backwards, and each block calls `backward()` in its own backward.",
    lambda: nn.Sequential(nn.Linear(8, 8), _Block(), _Block(), nn.Linear(8, 4)),
)


@program()
class evolution(Manual):
    """Evolution strategies: weights are perturbed and restored in place, and `p.grad` is set without any backward."""

    @torch.no_grad()
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, params = self.optimizers(), list(self.parameters())
        estimates = [torch.zeros_like(param) for param in params]
        for sample in range(3):
            generator = torch.Generator().manual_seed(10 * batch_idx + sample)
            noise = [(torch.randn(param.shape, generator=generator) * 0.1).to(param) for param in params]
            losses = []
            for sign in (1, -2):
                for param, each in zip(params, noise, strict=True):
                    param.add_(each, alpha=sign)
                losses.append(self.loss(batch))
            for param, each in zip(params, noise, strict=True):
                param.add_(each)
            slope = self.trainer.strategy.reduce(losses[0] - losses[1], reduce_op="mean")
            for estimate, each in zip(estimates, noise, strict=True):
                estimate.add_(each * slope)
        for param, estimate in zip(params, estimates, strict=True):
            param.grad = estimate
        optimizer.step()
        optimizer.zero_grad()
        self.log("slope", slope)


@program()
class min_norm(Manual):
    """MGDA: `torch.autograd.grad` of two losses for all parameters, and a backward of the weighted sum."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, params = self.optimizers(), list(self.parameters())
        out = self(batch[0])
        losses = [F.mse_loss(out, batch[1]), out.abs().mean()]
        grads = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
        flat = torch.stack([torch.cat([grad.flatten() for grad in each]) for each in grads])
        first, second = self.trainer.strategy.reduce(flat, reduce_op="mean")
        share = ((second - first) @ second / (second - first).square().sum()).clamp(0, 1)
        optimizer.zero_grad()
        self.manual_backward(share * losses[0] + (1 - share) * losses[1])
        optimizer.step()
        self.log("share", share)


@program()
class curvature_scaled(Manual):
    """AdaHessian: Hessian-vector products over all parameters scale their gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, params = self.optimizers(), list(self.parameters())
        generator = torch.Generator().manual_seed(batch_idx)
        slopes = torch.autograd.grad(self.loss(batch), params, create_graph=True)
        signs = [torch.randn(slope.shape, generator=generator).sign().to(slope) for slope in slopes]
        products = torch.autograd.grad(slopes, params, grad_outputs=signs)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for param, sign, product in zip(params, signs, products, strict=True):
            diagonal = self.trainer.strategy.reduce(sign * product, reduce_op="mean")
            param.grad /= 1 + diagonal.abs().mean()
        optimizer.step()


@program({"max_epochs": 2})
class consolidated(Regression):
    """EWC: at the end of an epoch, `torch.autograd.grad` for all parameters weights a penalty in the next one."""

    fisher: Any = ()

    def loss(self, batch: Any) -> Tensor:
        self.last, loss = batch, super().loss(batch)
        for param, fisher, start in self.fisher:
            loss = loss + (fisher * (param - start).square()).sum()
        return loss

    def on_train_epoch_end(self) -> None:
        params = list(self.parameters())
        grads = torch.autograd.grad(super().loss(self.last), params)
        fisher = [self.trainer.strategy.reduce(grad.square(), reduce_op="mean") for grad in grads]
        self.fisher = list(zip(params, fisher, [param.detach().clone() for param in params], strict=True))


@program()
class architecture_search(Manual):
    """DARTS: weights are moved along their gradient and back, for finite differences of another gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](torch.tanh(self.net[0](x)) * torch.sigmoid(self.gates))  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_weights, of_gates = self.optimizers()
        weights = list(self.net.parameters())
        way = [self.trainer.strategy.reduce(g) for g in torch.autograd.grad(self.loss(batch), weights)]
        slopes = []
        for length in (4.0, -8.0):
            for weight, each in zip(weights, way, strict=True):
                weight.data.add_(each, alpha=length)
            slopes.append(torch.autograd.grad(self.loss(batch), [self.gates])[0])
        for weight, each in zip(weights, way, strict=True):
            weight.data.add_(each, alpha=4.0)
        self.gates.grad = self.trainer.strategy.reduce(slopes[0] - slopes[1])
        of_gates.step()
        of_weights.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        of_weights.step()
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.Adam([self.gates], 0.01)


@program()
class sharpness_aware_hook(Regression):
    """SAM by Lightning's hook: `optimizer_step` runs the closure, moves the weights, and steps with it once more."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        with torch.no_grad():
            moves = [0.05 * param.grad for param in self.parameters()]  # type: ignore[operator]
            for param, move in zip(self.parameters(), moves, strict=True):
                param.add_(move)

        def second() -> Any:
            loss = optimizer_closure()
            with torch.no_grad():
                for param, move in zip(self.parameters(), moves, strict=True):
                    param.sub_(move)
            return loss

        optimizer.step(closure=second)


@program({"max_epochs": 2})
class pruned_for_good(Regression):
    """`prune.remove` after an epoch: the parameter changes its name, and its masked values stay."""

    def build(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        prune.custom_from_mask(net[0], "weight", (torch.arange(128) % 3 > 0).float().view(16, 8))
        return net

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            prune.remove(self.net[0], "weight")  # type: ignore[index]


@program({"max_epochs": 3})
class earlier_selves(Regression):
    """Frozen copies of the network, in a ModuleList that grows after each epoch, teach the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.earlier = nn.ModuleList()

    def loss(self, batch: Any) -> Tensor:
        out = self(batch[0])
        return F.mse_loss(out, batch[1]) + sum(0.1 * F.mse_loss(out, each(batch[0])) for each in self.earlier)

    def on_train_epoch_end(self) -> None:
        self.earlier.append(copy.deepcopy(self.net).eval().requires_grad_(False))
