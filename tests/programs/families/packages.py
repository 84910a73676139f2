"""Losses, layers and optimizers as packages write them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.programs.base import Manual, Regression
from tests.programs.program import Refusal, program
from tests.programs.run import Run

_ZERO = ("stage1*", "stage2*", "stage3*")


class _Proxies(nn.Module):
    """Movshovitz-Attias et al., 2017, as in pytorch-metric-learning: it moves its weight to the inputs' device."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4).cos())

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        self.proxies.data = self.proxies.data.to(embeddings.device)
        return F.cross_entropy(F.normalize(embeddings) @ F.normalize(self.proxies).T, labels)


class _Metric(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = _Proxies()

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self.net(batch[0]), batch[1].argmax(1))


@program()
class moved_in_each_forward(_Metric):
    """A loss moves its weights to the inputs' device in each forward: `self.proxies.data = self.proxies.data.to(x)`."""


@program()
class moved_and_kept(_Metric):
    """The same, and what was assigned is kept, read and written later."""

    def loss(self, batch: Any) -> Tensor:
        self.kept = self.criterion.proxies.data
        self.criterion.proxies.data = self.kept
        return super().loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("kept", self.kept.norm())
        self.kept.clamp_(-0.9, 0.9)


@program(reference="single", on_three_ranks=True)
class turned_in_the_forward(_Metric):
    """A square weight is transposed before each forward, and flipped after each step, by `weight.data = view`."""

    def loss(self, batch: Any) -> Tensor:
        self.criterion.proxies.data = self.criterion.proxies.data.T
        loss = super().loss(batch)
        self.log("proxy", self.criterion.proxies[1].sum().detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.criterion.proxies.data = self.criterion.proxies.data.flip(0)


class _Bounded(Optimizer):
    """Luo et al., 2019 (AdaBound), by sign: the first learning rates are in a list."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base_lrs = [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group, base_lr in zip(self.param_groups, self.base_lrs, strict=True):
            for param in group["params"]:
                if param.grad is not None:
                    bound = 0.1 * group["lr"] / base_lr
                    param.sub_((group["lr"] * param.grad).clamp(-bound, bound))
        return loss


class _CountsInTheFirst(Optimizer):
    """Steps are counted in the first group, for all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        step = self.param_groups[0].get("step", 0) + 1
        for group in self.param_groups:
            group["step"] = step
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * self.param_groups[0]["scale"] / step)
        return loss


class _DividesByAll(Optimizer):
    """The learning rate is divided by the number of tensors in all groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        number = sum(len(group["params"]) for group in self.param_groups)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / number)
        return loss


class _Langevin(torch.optim.SGD):
    """Welling and Teh, 2011: a step with noise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(torch.randn_like(param), alpha=0.01 * group["lr"])
        return loss


class _TwoGroups(Regression):
    def groups(self) -> list[dict[str, Any]]:
        vectors = [param for param in self.parameters() if param.ndim == 1]
        matrices = [param for param in self.parameters() if param.ndim > 1]
        return [{"params": vectors, "lr": 0.2}, {"params": matrices, "lr": 0.02}]


@program({"max_epochs": 2}, on_three_ranks=True)
class groups_known_by_position(_TwoGroups):
    """An optimizer that keeps the first learning rate of each group in a list, with a scheduler (AdaBound)."""

    def configure_optimizers(self) -> Any:
        optimizer = _Bounded(self.groups(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@program({"max_epochs": 2})
class counted_in_the_first_group(_TwoGroups):
    """An optimizer that has the number of steps, and a setting, in the first of its groups."""

    def configure_optimizers(self) -> Any:
        first, second = self.groups()
        return _CountsInTheFirst([{**first, "scale": 0.5}, {**second, "scale": 2.0}], {})

    def on_train_epoch_end(self) -> None:
        self.log("step", float(self.optimizers().param_groups[1]["step"]))  # type: ignore[union-attr]


@program({"max_epochs": 2})
class counted_in_the_first_group_of_more(_TwoGroups):
    """The same, with its second group added after an epoch."""

    def configure_optimizers(self) -> Any:
        return _CountsInTheFirst([{**self.groups()[0], "scale": 0.5}], {})

    def on_train_epoch_start(self) -> None:
        optimizer: Any = self.optimizers()
        if self.current_epoch:
            optimizer.add_param_group({**self.groups()[1], "scale": 2.0})

    def on_train_epoch_end(self) -> None:
        self.log("step", float(self.optimizers().param_groups[-1]["step"]))  # type: ignore[union-attr]


@program(refused=dict.fromkeys(_ZERO, Refusal("MisconfigurationException", "gradients of others")))
class divided_by_all_groups(_TwoGroups):
    """An optimizer that divides the learning rate by the number of tensors in all groups."""

    def configure_optimizers(self) -> Any:
        return _DividesByAll(self.groups(), {})


@program(refused=dict.fromkeys(_ZERO, Refusal("MisconfigurationException", "draws random numbers")))
class noise_in_each_step(Regression):
    """An optimizer that adds noise to the weights (Langevin dynamics), from equal seeds on all ranks."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(batch_idx)

    def configure_optimizers(self) -> Any:
        return _Langevin(self.parameters(), self.lr)


@program(on_three_ranks=True)
class parameters_as_keys(Regression):
    """Elastic weight consolidation: old values, and importances, are in dicts by parameter, and in sets by `id`."""

    def on_fit_start(self) -> None:
        self.old = {param: param.detach().clone() for param in self.parameters()}
        self.importance = {param: param.detach().abs() for param in self.parameters()}
        self.ids = set(map(id, self.net[0].parameters()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("known", sum(param in self.old for param in self.parameters()))
        self.log("first", sum(id(param) in self.ids for param in self.net.parameters()))
        for param in self.parameters():
            loss = loss + (self.importance[param] * (param - self.old[param])).square().sum()
        self.log("penalized", loss.detach(), sync_dist=True)
        return loss

    def on_after_backward(self) -> None:
        names = {param: name for name, param in self.named_parameters()}
        groups = self.optimizers().param_groups  # type: ignore[union-attr]
        self.log_dict({names[param]: param.grad.norm() for group in groups for param in group["params"]})


@program()
class known_in_the_forward(Regression):
    """A layer asks in its forward and in its backward whether its weight is one of those that the module has kept."""

    def on_fit_start(self) -> None:
        self.kept = {param: name for name, param in self.named_parameters()}
        self.seen: list[str] = []
        self.handles = [layer.register_forward_hook(self.note) for layer in (self.net[0], self.net[2])]

    def note(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.seen += [self.kept.get(layer.weight, "unknown"), self.kept.get(next(layer.parameters()), "unknown")]  # type: ignore[arg-type]
        output.register_hook(lambda grad: self.seen.append(self.kept.get(layer.weight, "unknown")))  # type: ignore[arg-type]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("unknown", self.seen.count("unknown"))
        self.log("seen", len(self.seen))


@program(on_three_ranks=True)
class class_token_written(Regression):
    """A class token, whose first dimension is 1, is written from tensors: `copy_`, `mul_`, `lerp_`, `p.data = x`."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.linspace(-1, 1, 8).view(1, 1, 8))

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0] + self.token[0]), batch[1])

    @torch.no_grad()
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        values = torch.linspace(0, batch_idx + 1, 8, device=self.device).cos().view(1, 1, 8)
        if batch_idx == 0:
            self.token.copy_(values)
        self.token.mul_(values)
        self.token.lerp_(values, 0.1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.token.data = self.token.data / self.token.data.norm()


@program()
class set_from_the_first_batch(Regression):
    """A scale and a shift are set from the first batch, averaged over the ranks (ActNorm), within the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1, 8)), nn.Parameter(torch.zeros(1, 8))
        self.is_set = False

    def loss(self, batch: Any) -> Tensor:
        if not self.is_set:
            mean, std = self.all_gather(torch.stack([batch[0].mean(0), batch[0].std(0)])).view(-1, 2, 8).mean(0)
            self.scale.data, self.shift.data = 1 / std[None], -mean[None] / std[None]
            self.is_set = True
        return F.mse_loss(self.net(batch[0] * self.scale + self.shift), batch[1])


@program()
class class_made_of_a_layer(Regression):
    """A class is made of a layer's class, and an instance of it is called beside the layer, as `higher` does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        layer = self.net[0]
        own = {"forward": lambda self, x: F.linear(x, 2 * self.weight, self.bias)}
        twin = type("Twin", (type(layer),), own)(8, 16).to(self.device)
        twin.load_state_dict(layer.state_dict())
        with torch.no_grad():
            self.log("twin", twin(batch[0]).norm(), sync_dist=True)
        self.log("is_one", float(isinstance(twin, nn.Linear)))
        return self.loss(batch)


@torch.compile(backend="eager", dynamic=False)
def _norm_of(weight: Tensor) -> Tensor:
    return weight.square().sum().sqrt() + weight.abs().max()


@program()
class weights_in_a_compiled_function(Regression):
    """A compiled function gets a weight, a detached one, and one that was kept, in and between steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("before", _norm_of(self.net[0].weight.detach()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.kept = self.net[2].weight.data
        self.log("kept", _norm_of(self.kept))
        return loss + 0.1 * _norm_of(self.net[0].weight)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", _norm_of(self.kept))


@program()
class gradients_in_a_backward_hook(Regression):
    """A backward hook of each layer reads its gradients, by `layer.parameters()` and by parameters that are kept."""

    def on_fit_start(self) -> None:
        self.kept = {layer: list(layer.parameters()) for layer in self.net}  # type: ignore[union-attr]
        self.seen: list[float] = []
        for layer in (self.net[0], self.net[2]):
            layer.register_full_backward_hook(self.note)

    def note(self, layer: nn.Module, *unused: Any) -> None:
        for param in (*layer.parameters(), *self.kept[layer]):
            self.seen.append(-1.0 if param.grad is None else float(param.grad.norm()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("seen", sum(self.seen), sync_dist=True)
        self.log("missing", self.seen.count(-1.0), sync_dist=True)


@program(reference="single")
class gradients_written_in_a_backward(Regression):
    """A hook after each accumulation, set in `__init__`, doubles the gradient of a parameter that is kept."""

    def __init__(self) -> None:
        super().__init__()
        for param in self.parameters():
            param.register_post_accumulate_grad_hook(self.double)

    def on_fit_start(self) -> None:
        self.kept = {param: param for param in self.parameters()}

    def double(self, param: Any) -> None:
        kept = self.kept[param]
        kept.grad = 2 * kept.grad


class _KeepsFromForwards(Regression):
    """A hook of each layer keeps its weight, in the forward."""

    def on_fit_start(self) -> None:
        self.kept: list[Any] = []
        for layer in (self.net[0], self.net[2]):
            layer.register_forward_hook(lambda layer, args, output: self.kept.append(layer.weight), prepend=True)

    def norms(self, name: str) -> None:
        self.log_dict({f"{name}{number}": weight.detach().norm() for number, weight in enumerate(self.kept[:2])})


@program(on_three_ranks=True)
class kept_from_a_forward(_KeepsFromForwards):
    """Weights that a hook has kept in a forward are read, with their gradients, at any time, and used in the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx:
            self.norms("start")
        loss = self.loss(batch)
        self.norms("loss")
        return loss + F.linear(batch[0], self.kept[0]).square().mean() + 0.01 * self.kept[1].square().sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("gradient", self.kept[0].grad.norm())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.norms("end")
        self.log("known", float(self.kept[0] in set(self.parameters())))


@program()
class kept_from_a_forward_and_written(_KeepsFromForwards):
    """The same weights are written: after the forward, after the step, by `p.data`, and as gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx:
            self.kept[1].data.mul_(0.95)
        return loss

    def on_after_backward(self) -> None:
        self.kept[0].grad = 2 * self.kept[0].grad

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.kept[0].mul_(0.9)
        self.kept[1].data = self.kept[1].data.clamp(-0.3, 0.3)
        self.norms("end")


@program()
def kept_from_a_forward_after_the_fit(run: Run) -> None:
    """The same weights are read, copied and trained further after the fit."""
    module = _KeepsFromForwards()
    run.fit(module)
    copied = copy.deepcopy(module.kept[0])
    run.keep(weight=module.kept[0].detach().cpu() * 1, other=copied.detach().cpu())
    module.kept[1].detach().mul_(0.5)
    run.keep(half=module.net[2].weight.detach().cpu() * 1)
