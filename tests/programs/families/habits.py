"""Habits of LightningModules that touch weights and gradients in ways that no other family has."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.programs.base import Manual, Regression, TwoParts, step
from tests.programs.program import program
from tests.programs.run import Run


@program()
class pruned_by_mask(Regression):
    """`torch.nn.utils.prune`: masks of random entries, and the weight computed by a hook before each forward."""

    def build(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        prune.random_unstructured(net[0], "weight", 0.5)
        prune.l1_unstructured(net[2], "weight", 0.25)
        return net


@program()
def pruned_by_mask_while_training(run: Run) -> None:
    """The masks of `torch.nn.utils.prune.custom_from_mask` are edited in place after an epoch."""

    class Prunes(Regression):
        def build(self) -> nn.Module:
            net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
            prune.custom_from_mask(net[0], "weight", torch.ones(16, 8))
            return net

        def on_train_epoch_end(self) -> None:
            self.net[0].weight_mask[:, ::2] = 0  # type: ignore[index, union-attr, operator]

    run.fit(Prunes(), max_epochs=2)


@program()
class triangular_flow(Regression):
    """A flow: `torch.linalg.slogdet` of a weight in the loss."""

    def build(self) -> nn.Module:
        return nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def loss(self, batch: Any) -> Tensor:
        z, logdet = batch[0], torch.zeros((), device=self.device)
        for layer in self.net:  # type: ignore[attr-defined]
            z = layer(z)
            logdet = logdet + torch.linalg.slogdet(layer.weight)[1]
        return 0.01 * (z.square().sum(1).mean() - logdet)


@program()
class multi_grad_hook(Regression):
    """`register_multi_grad_hook` on two activations, which scales nothing and logs their norms."""

    def loss(self, batch: Any) -> Tensor:
        a = self.net[0](batch[0])  # type: ignore[index]
        b = self.net[1](a)  # type: ignore[index]
        if torch.is_grad_enabled():
            torch.autograd.graph.register_multi_grad_hook((a, b), self._note)
        return F.mse_loss(self.net[2](b), batch[1])  # type: ignore[index]

    def _note(self, grads: Any) -> None:
        self.noted = sum(float(g.norm()) for g in grads if g is not None)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("noted", self.noted, sync_dist=True)


@program()
class backward_pre_hook(Regression):
    """`register_full_backward_pre_hook` scales the gradient of a layer's output."""

    def build(self) -> nn.Module:
        net = super().build()
        net[0].register_full_backward_pre_hook(lambda module, grads: tuple(0.5 * g for g in grads))  # type: ignore
        return net


@program()
class backward_hook_with_weight(Regression):
    """`register_full_backward_hook` of the last layer reads its weight and replaces the gradient of its input."""

    def build(self) -> nn.Module:
        net = super().build()
        net[2].register_full_backward_hook(  # type: ignore[index, operator]
            lambda module, inputs, outputs: (inputs[0] / (1 + module.weight.norm().detach()),)
        )
        return net


@program()
class hypernetwork(Regression):
    """A network makes the weights of another one, called by `functional_call`."""

    def build(self) -> nn.Module:
        self.target = nn.Linear(8, 4).requires_grad_(False)
        self.code = nn.Parameter(torch.randn(3))
        return nn.Linear(3, 36)

    def forward(self, x: Tensor) -> Tensor:
        made = self.net(self.code)
        return torch.func.functional_call(self.target, {"weight": made[:32].view(4, 8), "bias": made[32:]}, (x,))


@program()
class chained_schedulers(Regression):
    """`ChainedScheduler` of a warmup and a decay, after each step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        warmup = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1, 2)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        both = torch.optim.lr_scheduler.ChainedScheduler([warmup, decay], optimizer)
        return [optimizer], [{"scheduler": both, "interval": "step", "frequency": 2}]


@program()
class straight_through(Regression):
    """Quantization-aware training: `fake_quantize_per_tensor_affine` of weights, scaled by their largest entry."""

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 2):
            layer = self.net[index]  # type: ignore[index]
            scale = float(layer.weight.detach().abs().max()) / 127
            x = F.linear(x, torch.fake_quantize_per_tensor_affine(layer.weight, scale, 0, -128, 127), layer.bias)
            x = x.tanh() if index == 0 else x
        return x


@program(reference="single")
class toggled_by_optimizer(TwoParts):
    """`toggle_model` of a `LightningOptimizer`, over two backward passes per step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, name in zip(self.optimizers(), "ab", strict=True):
            for half in range(2):
                with optimizer.toggle_model(sync_grad=half == 1):
                    self.manual_backward(self.use(name, batch) / 2)
            step(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[name].parameters(), 0.1) for name in "ab"]  # type: ignore[index]


@program()
class by_tokens(Manual):
    """Batches are accumulated by hand, and gradients divided by the number of all ranks' rows before the step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        rows = self.all_gather(torch.tensor(float(len(batch[0])), device=self.device)).sum()
        self.manual_backward(F.mse_loss(self(batch[0]), batch[1], reduction="sum"))
        self.rows = getattr(self, "rows", 0) + rows
        if batch_idx % 2:
            for param in self.parameters():
                if param.grad is not None:
                    param.grad.div_(self.rows)
            self.rows = 0
            step(optimizer)


@program()
def anomalies(run: Run) -> None:
    """`detect_anomaly` and clipping by value, the validation in the midst of an epoch, an uneven last window."""
    run.fit(
        Regression(),
        run.loader(5),
        run.loader(2),
        detect_anomaly=True,
        gradient_clip_val=0.01,
        gradient_clip_algorithm="value",
        accumulate_grad_batches=2,
        val_check_interval=2,
        max_epochs=2,
    )


@program()
def overfits_batches(run: Run) -> None:
    """A fit with `overfit_batches`, the same rows each epoch, and reloaded loaders."""
    run.fit(Regression(), overfit_batches=2, reload_dataloaders_every_n_epochs=1, max_epochs=2)


@program()
def adapts_in_validation(run: Run) -> None:
    """`inference_mode=False`: validation takes the gradient of its loss with respect to its inputs, and steps them."""

    class Adapts(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            with torch.enable_grad():
                x = batch[0].clone().requires_grad_(True)
                (grad,) = torch.autograd.grad(F.mse_loss(self(x), batch[1]), x)
            self.log("val_loss", F.mse_loss(self(x - grad), batch[1]).detach(), sync_dist=True)

    run.fit(Adapts(), run.loader(3), run.loader(2), inference_mode=False, max_epochs=2)


@program()
def evaluated_between_fits(run: Run) -> None:
    """Another module is tested and predicts between two fits of the first one."""

    class Tests(Regression):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: Any) -> Tensor:
            return self(batch[0])

    module, other = Tests(), Tests()
    run.fit(module)
    run.trainer().test(other, run.loader(2), verbose=False)
    run.trainer().predict(module, run.loader(1))
    run.fit(module)
    run.trainer().test(module, run.loader(2), verbose=False)


@program()
class edits_momentum(Regression):
    """The group's momentum and weight decay are edited each batch, and the learning rate by `optimizer_step`."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["momentum"], group["weight_decay"] = 0.5 + 0.1 * batch_idx, 0.01 * batch_idx

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.trainer.global_step + 1) / 3)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


@program()
class uses_hooked_weight(Regression):
    """A hook of the module before its forward centres its weight in place, under `no_grad`."""

    def build(self) -> nn.Module:
        net = super().build()
        net[0].register_forward_pre_hook(self._centre)  # type: ignore[index, operator]
        return net

    @staticmethod
    def _centre(module: nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            with torch.no_grad():
                module.weight.sub_(module.weight.mean(1, keepdim=True))  # type: ignore[operator, union-attr]


@program()
class saved_weight_function(Regression):
    """An `autograd.Function` saves a weight and computes its gradient by hand."""

    class Apply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.t() @ x

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.net[0], self.net[2]  # type: ignore[index]
        return self.Apply.apply(self.Apply.apply(x, first.weight).tanh(), last.weight) + last.bias + first.bias.mean()


@program()
class trust_ratio(Regression):
    """Gradients are scaled by norms of weight and gradient, as LARS does, in `on_before_optimizer_step`."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(param.detach().norm() / (param.grad.norm() + 1e-3))


@program()
class centralized(Regression):
    """Gradients of matrices are centralized in `on_after_backward`, and those of vectors set to new tensors."""

    def on_after_backward(self) -> None:
        for param in self.parameters():
            if param.grad is not None:
                if param.ndim > 1:
                    param.grad.sub_(param.grad.mean(1, keepdim=True))
                else:
                    param.grad = param.grad.sign() * 0.01


@program()
class reinitialized(Regression):
    """The last layer is made anew by `reset_parameters` after an epoch, with the momentum left as it is."""

    def on_train_epoch_end(self) -> None:
        torch.manual_seed(7)
        self.net[2].reset_parameters()  # type: ignore[index, operator]
        self.log("weight", self.net[2].weight.detach().norm(), sync_dist=True)  # type: ignore[index]
