"""Parameters that are known by their class, by an attribute or by identity, and lists that leave some out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.base import Regression
from tests.programs.program import Refusal, program

# -- what optimizers look at ------------------------------------------------------------------------------------------


class Positive(nn.Parameter):
    """As the parameters of packages for manifolds."""

    def project(self) -> None:
        with torch.no_grad():
            self.clamp_(min=0.01)


class _Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = Positive(torch.rand(4, 8)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, Positive)
        return F.linear(x, self.weight, self.bias)


class _Projects(Regression):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), _Projected())


@program(on_three_ranks=True)
class parameter_class(_Projects):
    """A parameter of a class of one's own, by which it is found and projected after each batch."""

    def on_train_batch_end(self, *unused: Any) -> None:
        for param in self.parameters():
            if isinstance(param, Positive):
                param.project()


class _ProjectingSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if isinstance(param, Positive):
                    param.project()
        return loss


@program(on_three_ranks=True)
class parameter_class_in_optimizer(_Projects):
    """An optimizer that knows such parameters, as those on manifolds do."""

    def configure_optimizers(self) -> Any:
        return _ProjectingSGD(self.parameters(), 0.3)


@program()
class parameter_class_clipped(_Projects):
    """The same with a group for each, momentum, and clipping by norm."""

    def configure_optimizers(self) -> Any:
        known = [param for param in self.parameters() if isinstance(param, Positive)]
        others = [param for param in self.parameters() if not isinstance(param, Positive)]
        torch.optim.SGD(others, 0.1)  # from now on the step of the base class has the hooks of the step, too
        return _ProjectingSGD([{"params": others}, {"params": known, "lr": 0.1}], 0.2, momentum=0.9)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)


class _InABall(torch.optim.Adam):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if hasattr(param, "ball"):
                    norm = param.norm(dim=-1, keepdim=True).clamp(min=1e-6)
                    param.copy_(torch.where(norm > param.ball, param / norm * param.ball, param))
        return loss


@program(on_three_ranks=True)
class parameter_attribute_in_optimizer(Regression):
    """An optimizer that looks at an attribute of parameters, which the model has set and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].weight.ball = 0.8  # type: ignore[index]

    def on_train_batch_start(self, *unused: Any) -> None:
        self.net[2].weight.ball -= 0.1  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        return _InABall(self.parameters(), 0.1)


class _ByIdentity(torch.optim.SGD):
    def __init__(self, params: Any, lr: float, factors: dict[int, float]) -> None:
        super().__init__(params, lr)
        self.factors = factors

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(self.factors.get(id(param), 1.0))
        return loss


_KNOWN = {"stage[123]*": Refusal("MisconfigurationException", r"knows parameters by `id\(param\)`.*zeroplus_fsdp")}


@program(refused=_KNOWN)
class optimizer_by_identity(Regression):
    """An optimizer that has factors by `id(param)`."""

    def configure_optimizers(self) -> Any:
        return _ByIdentity(self.parameters(), 0.1, {id(self.net[0].weight): 0.9})  # type: ignore[index]


class _ByKey(torch.optim.SGD):
    def __init__(self, params: Any, lr: float, special: set[Any]) -> None:
        super().__init__(params, lr)
        self.special = special

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param in self.special:
                    param.clamp_(-0.1, 0.1)
        return loss


@program(refused=_KNOWN)
class optimizer_by_key(Regression):
    """An optimizer that has a set of parameters."""

    def configure_optimizers(self) -> Any:
        return _ByKey(self.parameters(), 0.1, {self.net[0].weight})  # type: ignore[index]


# -- lists that leave some out ----------------------------------------------------------------------------------------


class _Frozen(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), self.lr, momentum=0.9)


@program(on_three_ranks=True)
class parameters_overridden(_Frozen):
    """`def parameters(self)` gives the trainable ones, and the Trainer clips by norm."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (param for param in super().parameters(recurse) if param.requires_grad)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


@program()
class parameters_overridden_without_the_trunk(Regression):
    """`def parameters(self)` gives the head, and a group of the optimizer has the trunk."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return cast(nn.Module, self.net[2]).parameters()  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        trunk = {"params": self.net[0].parameters(), "lr": 0.05}  # type: ignore[index]
        return torch.optim.SGD([{"params": self.parameters()}, trunk], 0.1)


@program()
class named_parameters_overridden(_Frozen):
    """`def named_parameters(self)` leaves out what is frozen."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return (pair for pair in super().named_parameters(*args, **kwargs) if pair[1].requires_grad)


@program(refused={"stage*": Refusal("ValueError", r"has a parameter of shape .* none of the.*ModuleList")})
class layers_in_a_plain_list(Regression):
    """A layer is in a plain list, and the optimizer has it: under DDP each rank trains its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(8, 4)]

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]) + self.hidden[0](batch[0]).mean() * 0.1, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.hidden[0].parameters()], 0.1)


# -- modules that are copied, or compiled -----------------------------------------------------------------------------

_SCRIPTED = Refusal("ValueError|MisconfigurationException", r"torch\.jit\.script.*runs no hooks.*zeroplus_stage2")


@program(refused={"stage3*": _SCRIPTED, "fsdp*": _SCRIPTED})
class scripted_network(Regression):
    """`torch.jit.script` of the network."""

    def build(self) -> nn.Module:
        return cast(nn.Module, torch.jit.script(super().build()))


@program(refused={"stage3*": _SCRIPTED, "fsdp*": _SCRIPTED})
class scripted_layer(Regression):
    """`torch.jit.script` of a layer."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), torch.jit.script(nn.Linear(16, 4)))


def _clone(module: Any, memo: dict[int, Any]) -> Any:
    """As `clone_module` of learn2learn."""
    clone = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    for name in ("_parameters", "_buffers", "_modules"):
        setattr(clone, name, getattr(clone, name).copy())
    for name, param in module._parameters.items():
        if param is not None:
            clone._parameters[name] = memo.setdefault(id(param), param.clone())
    for name, child in module._modules.items():
        clone._modules[name] = _clone(child, memo)
    return clone


@program(on_three_ranks=True)
class modules_cloned(Regression):
    """MAML by learn2learn: a clone of the modules, whose parameters are tensors, takes a step on half of a batch."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        learner = _clone(self.net, {})
        places = [(module, name) for module in learner.modules() for name in module._parameters]
        params = [module._parameters[name] for module, name in places]
        grads = torch.autograd.grad(F.mse_loss(learner(x[:2]), y[:2]), params, create_graph=True)
        for (module, name), param, grad in zip(places, params, grads, strict=True):
            module._parameters[name] = param - 0.1 * grad
        return F.mse_loss(learner(x[2:]), y[2:])
