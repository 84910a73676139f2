"""Modules that change their weights, or what is trained, within their own forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.base import Regression
from tests.programs.program import program
from tests.programs.run import Run


class Last(nn.Linear):
    """The last layer, which knows the number of the batch."""

    batch_idx = 0

    def __init__(self) -> None:
        super().__init__(16, 4)

    def is_odd(self) -> bool:
        return self.batch_idx % 2 == 1


class ChangesIn(Regression):
    """Subclasses say what the last layer does."""

    Last: type[Last]

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), self.Last())

    @property
    def last(self) -> Any:
        return self.net[2]  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.last.batch_idx = batch_idx
        return super().training_step(batch, batch_idx)


#: DDP must not wait for gradients of what is frozen.
_FREEZES: dict[str, Any] = {"reference": "ddp_find_unused_parameters_true"}

# -- what is trained --------------------------------------------------------------------------------------------------


class _Prototypes(nn.Module):
    """As the prototypes of SwaV."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(16, 4, bias=False)])

    def normalize(self) -> None:
        with torch.no_grad():
            weight: Any = self.heads[0].weight
            weight.div_(weight.norm(dim=1, keepdim=True))

    def forward(self, x: Tensor, batch_idx: int) -> Tensor:
        self.requires_grad_(batch_idx >= 1)
        return self.heads[0](x)


@program(**_FREEZES)
class prototypes_frozen_in_forward(Regression):
    """SwaV: prototypes are normalized before each step, and freeze themselves in their forward for the first step."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"backbone": nn.Linear(8, 16), "prototypes": _Prototypes()})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        backbone, prototypes = self.net.values()  # type: ignore[operator]
        prototypes.normalize()
        views = (batch[0], 2 * batch[0])
        return sum(F.mse_loss(prototypes(backbone(x).tanh(), batch_idx), batch[1]) for x in views)  # type: ignore[return-value]


@program(**_FREEZES)
class frozen_in_pre_hook(ChangesIn):
    """A layer is frozen in every other step, by its forward pre-hook."""

    class Last(Last):
        def __init__(self) -> None:
            super().__init__()
            self.register_forward_pre_hook(lambda layer, args: layer.requires_grad_(layer.is_odd()) and None)


@program(**_FREEZES, on_three_ranks=True)
class frozen_for_one_of_two_uses(ChangesIn):
    """A layer is used twice in its forward: frozen in the first use, and trained in the second."""

    class Last(Last):
        def forward(self, x: Tensor) -> Tensor:
            self.requires_grad_(False)
            first = super().forward(x)
            self.requires_grad_(True)
            return first + super().forward(2 * x)


@program(**_FREEZES)
class unfrozen_in_forward_with_hooks(ChangesIn):
    """Parameters with gradient hooks are frozen before the epoch, and unfrozen in the second step, in the forward."""

    class Last(Last):
        def forward(self, x: Tensor) -> Tensor:
            self.requires_grad_(self.batch_idx >= 1)
            return super().forward(x)

    def on_fit_start(self) -> None:
        for param in self.last.parameters():
            param.register_hook(lambda grad: 2 * grad)

    def on_train_epoch_start(self) -> None:
        self.last.requires_grad_(False)


@program(**_FREEZES)
class frozen_by_name_in_forward(ChangesIn):
    """A layer freezes its bias by its name in its forward, in every other step; `parameters()` show it at once."""

    class Last(Last):
        def forward(self, x: Tensor) -> Tensor:
            self.bias.requires_grad = self.is_odd()
            penalty = sum(param.square().sum() for param in self.parameters() if param.requires_grad)
            return super().forward(x) + 0.1 * penalty


# -- weights ----------------------------------------------------------------------------------------------------------


@program(on_three_ranks=True)
class clamped_in_forward(ChangesIn):
    """A layer clamps its weights in its forward: `for p in self.parameters(): p.data.clamp_(...)`."""

    class Last(Last):
        def forward(self, x: Tensor) -> Tensor:
            for param in self.parameters():
                param.data.clamp_(-0.1, 0.1)
            return super().forward(x)


@program()
class scaled_between_two_uses(ChangesIn):
    """A layer uses its weights, scales them, and uses them again."""

    class Last(Last):
        def forward(self, x: Tensor) -> Tensor:
            first = super().forward(x)
            for param in self.parameters():
                param.data.mul_(0.5)
            return first + super().forward(2 * x)


@program()
class scaled_and_assigned_in_forward(ChangesIn):
    """A layer scales its weights in its forward under `no_grad`, and assigns the data of one by its name."""

    class Last(Last):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for param in self.parameters():
                    param.mul_(0.9)
            named = dict(self.named_parameters())
            named["weight"].data = F.normalize(named["weight"].data, dim=1)
            named["bias"].data[0] = 1.0
            return super().forward(x)


@program()
class read_after_a_write_in_forward(ChangesIn):
    """A layer writes `self.weight.data` in its forward, then reads all its parameters, without and with gradients."""

    class Last(Last):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.mul_(0.9)
            with torch.no_grad():
                norm = sum(param.square().sum() for param in self.parameters())
            values = torch.cat([param.data.flatten() for param in self.parameters()])
            return super().forward(x) * norm + values.sum() + sum(param.mean() for param in self.parameters())


@program()
class views_read_after_a_write_in_forward(ChangesIn):
    """A layer scales `self.weight` in its forward, then reads what was kept of it before: `p.data`, `p.detach()[0]`."""

    class Last(Last):
        kept: Any = ()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.9)
            return super().forward(x) + sum(view.sum() for view in self.kept)

    def on_train_start(self) -> None:
        self.last.kept = [self.last.weight.data, self.last.weight.detach()[0]]


class _ClampedAndRead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        for param in self.parameters():
            param.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            norm = sum(param.square().sum() for param in self.parameters())
        return super().forward(x) * norm


@program(on_three_ranks=True)
class written_in_forwards_in_another_order(Regression):
    """Two layers clamp their weights in their forward, then read them; each rank uses the layers in its own order."""

    def build(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(8, 16), _ClampedAndRead(16, 4), _ClampedAndRead(16, 4)])

    def forward(self, x: Tensor) -> Tensor:
        first, *branches = self.net  # type: ignore[misc]
        hidden = first(x).tanh()
        results = [branch(hidden) for branch in (branches if self.global_rank else reversed(branches))]
        return results[0] + results[1]


@program()
class vector_written_in_forward(ChangesIn):
    """A layer writes all its weights in its forward by `vector_to_parameters`."""

    class Last(Last):
        def forward(self, x: Tensor) -> Tensor:
            vector = nn.utils.parameters_to_vector(self.parameters()).detach()
            nn.utils.vector_to_parameters(0.9 * vector, self.parameters())
            return super().forward(x)


@program()
class initialized_in_forward(ChangesIn):
    """A layer initializes its weights anew in its forward, in every other step."""

    class Last(Last):
        def forward(self, x: Tensor) -> Tensor:
            if self.is_odd():
                torch.manual_seed(self.batch_idx)
                nn.init.normal_(next(self.parameters()), std=0.1)
            return super().forward(x)


class _Scales(ChangesIn):
    """Has a hook that scales the weights of its module."""

    class Last(Last): ...

    def scale(self, layer: nn.Module, *unused: Any) -> None:
        for param in layer.parameters():
            param.data.mul_(0.9)


@program()
class written_in_forward_hooks(_Scales):
    """Hooks before and after a layer's forward scale its weights."""

    def on_fit_start(self) -> None:
        self.last.register_forward_pre_hook(self.scale)
        self.last.register_forward_hook(self.scale)


@program()
class written_in_backward_pre_hook(_Scales):
    """A hook before a layer's backward scales its weights: its input's gradient has the scaled ones."""

    def on_fit_start(self) -> None:
        self.last.register_full_backward_pre_hook(self.scale)


@program()
def written_in_forward_of_validation(run: Run) -> None:
    """A hook scales a layer's weights before its forward, in validation only."""

    class Module(_Scales):
        def on_fit_start(self) -> None:
            self.last.register_forward_pre_hook(lambda layer, args: None if layer.training else self.scale(layer))

    run.fit(Module(), val=run.loader(2), max_epochs=2)


@program()
class averaged_in_forward(ChangesIn):
    """A layer blends its weights in its forward with an average, which it keeps: parameters that were kept before."""

    class Last(Last):
        kept: Any = ()

        def forward(self, x: Tensor) -> Tensor:
            for param, average in self.kept:
                param.data.lerp_(average, 0.3)
                average.copy_(param.data)
            return super().forward(x)

    def on_train_start(self) -> None:
        self.last.kept = [(param, param.detach().clone()) for param in self.last.parameters()]


# -- gradients --------------------------------------------------------------------------------------------------------


class _Sums(ChangesIn):
    """Gradients are never zeroed."""

    def optimizer_zero_grad(self, *unused: Any) -> None: ...


@program()
class gradient_changed_in_forward(_Sums):
    """A layer scales the last step's gradient in its forward, `self.weight.grad.mul_(...)`, and drops another."""

    class Last(Last):
        def forward(self, x: Tensor) -> Tensor:
            if self.weight.grad is not None:
                self.weight.grad.mul_(0.5)
                x = x * (1 + self.weight.grad.norm())
                self.bias.grad = None
            return super().forward(x)


@program()
class hooks_made_in_forward(ChangesIn):
    """A layer sets hooks on its parameters in its forward, and takes them away after the backward."""

    class Last(Last):
        hooks: Any = ()

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.parameters()
            self.hooks = first.register_hook(torch.neg), second.register_post_accumulate_grad_hook(self.halve)
            return super().forward(x)

        def halve(self, param: Tensor) -> None:
            assert param.grad is not None
            param.grad.mul_(0.5)

    def on_after_backward(self) -> None:
        for hook in self.last.hooks:
            hook.remove()


# -- the LightningModule ----------------------------------------------------------------------------------------------


@program(**_FREEZES)
class own_parameters_written_in_step(Regression):
    """The LightningModule's own parameters are clamped in its step, and one is frozen in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.full((4,), 2.0)), nn.Parameter(torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for name, param in self.named_parameters():
            if not name.startswith("net."):
                param.data.clamp_(-0.5, 1.0)
        self.shift.requires_grad_(batch_idx % 2 == 0)
        shift = self.shift if self.shift.requires_grad else self.shift * 0.5
        return F.mse_loss(self(batch[0]) * self.scale + shift, batch[1])
