"""Parameters that no optimizer has, although they are not frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import nn

from tests.programs.base import Manual, Regression, TwoParts
from tests.programs.program import Refusal, program
from tests.programs.run import Run


class _HeadOnly(Regression):
    """The optimizer has the last layer; the first one was not frozen."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2].parameters(), 0.1, momentum=0.9)  # type: ignore[index]


@program({"max_epochs": 2}, stays=("net.0.*",))
class outside_and_clipped(_HeadOnly):
    """The optimizer has the head alone: clipping by hand, over all parameters, counts what adds up in the others."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))
        self.log("clipped", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5))


@program({"gradient_clip_val": 0.1}, stays=("net.0.*",))
class outside_and_clipped_by_lightning(_HeadOnly):
    """The same with `gradient_clip_val`, which clips what the optimizer has."""


@program(stays=("net.0.*",))
class outside_by_hand(_HeadOnly, Manual):
    """The gradient of what no optimizer has is used by hand, after the step, and zeroed by the module at times."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for part in (slice(2), slice(2, 4)):
            self.manual_backward(F.mse_loss(self(batch[0][part]), batch[1][part]) / 2)
        optimizer.step()
        optimizer.zero_grad()
        first = self.net[0].weight  # type: ignore[index]
        self.log("norm", first.grad.norm())
        with torch.no_grad():
            self.net[2].weight.add_(first.grad.mean(), alpha=-0.1)  # type: ignore[index]
        if batch_idx == 1:
            self.zero_grad()
            assert first.grad is None
        if batch_idx == 2:
            first.grad = None


@program(precision="16-true", stays=("net.0.*",))
class low_outside(_HeadOnly, Manual):
    """The same in 16-true: the norm is that of gradients without a loss scale."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.2)
        optimizer.step()


@program(reference="ddp_find_unused_parameters_true", stays=("net.0.*", "net.2.*"))
class outside_on_one_rank(Manual):
    """Each rank's loss uses another network; the optimizer has neither, but a third one, which follows them."""

    def build(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.zero_grad()
        mine = self.net[2 * (self.global_rank % 2)]  # type: ignore[index]
        self.manual_backward(F.mse_loss(mine(batch[0]) + self.net[1](batch[0]), batch[1]))  # type: ignore[index]
        grads = [self.net[index].weight.grad for index in (0, 2)]  # type: ignore[index]
        self.net[1].weight.grad.add_(grads[0] - grads[1])  # type: ignore[index]
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[1].parameters(), 0.1)  # type: ignore[index]


class _Looks(_HeadOnly, Manual):
    """The gradient of what no optimizer has goes to the log."""

    def look(self, name: str, at: int = 0) -> None:
        grad = self.net[at].weight.grad  # type: ignore[index]
        self.log(name, -1.0 if grad is None else grad.norm(), sync_dist=True)


@program(stays=("net.0.*",))
class outside_after_zero_grad(_Looks):
    """`optimizer.zero_grad()` leaves alone what it does not have: it is read, scaled, assigned and dropped by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.zero_grad()
        self.look("after_zero_grad")
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.look("after_the_step")
        optimizer.zero_grad()
        self.look("in_the_end")
        weight = self.net[0].weight  # type: ignore[index]
        if batch_idx == 1:
            weight.grad = None
        if batch_idx == 2:
            weight.grad *= 3
        if batch_idx == 3:
            weight.grad = torch.ones_like(weight)


@program(precision="bf16-true", stays=("net.0.*",))
class low_outside_after_zero_grad(outside_after_zero_grad):
    """The same in bf16-true."""


@program(stays=("net.0.*",))
class outside_after_zeros(_Looks):
    """`optimizer.zero_grad(set_to_none=False)`, before the step and after it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.zero_grad(set_to_none=False)
        self.look("after_zero_grad")
        self.manual_backward(self.loss(batch))
        self.look("before_the_step")
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        self.look("in_the_end")


@program(stays=("net.0.*",))
class outside_written(_Looks):
    """It is dropped, assigned or scaled before `optimizer.zero_grad()`: the next backward adds to that."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        weight = self.net[0].weight  # type: ignore[index]
        if batch_idx == 0:
            weight.grad = None
        elif batch_idx == 1:
            weight.grad = torch.ones_like(weight)
        elif batch_idx == 2:
            weight.grad.mul_(2)
        else:
            weight.grad = weight.grad * 2
        optimizer.zero_grad()
        self.look("after_zero_grad")
        self.manual_backward(self.loss(batch))
        self.look("before_the_step")
        optimizer.step()
        optimizer.zero_grad()
        self.look("in_the_end")


@program(stays=("net.c.*",))
class outside_of_two(TwoParts):
    """A third network, which neither of two optimizers has."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4), "c": nn.Linear(4, 4)})

    def compute(self, batch: Any) -> None:
        a, b, c = self.net.values()  # type: ignore[union-attr]
        self.manual_backward(F.mse_loss(c(a(batch[0]) + b(batch[0])), batch[1]))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        weight = self.net["c"].weight  # type: ignore[index]
        self.compute(batch)
        first.step()
        first.zero_grad()
        self.log("after_one", weight.grad.norm())
        second.zero_grad()
        self.log("after_both", weight.grad.norm())
        if batch_idx == 1:
            weight.grad = None
        self.compute(batch)
        second.step()
        first.zero_grad()
        second.zero_grad()
        self.log("in_the_end", weight.grad.norm())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[name].parameters(), 0.1) for name in "ab"], []  # type: ignore[index]


_FSDP = dict.fromkeys(
    ("fsdp", "fsdp_*"),
    Refusal(
        "RuntimeError", r"`param\.grad` (was read or written after|is not reduced yet inside) .*block_backward_sync"
    ),
)
_BOTH = Refusal("RuntimeError", r"sum of an average and of this rank's own gradient.*Do it before the window")


@program(refused=_FSDP, stays=("net.0.*",))
class outside_after_no_sync(_Looks):
    """It is read in `block_backward_sync()`, after it, and after another backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            self.manual_backward(self.loss(batch))
            self.look("within")
        self.look("after")
        self.manual_backward(self.loss(batch))
        self.look("after_another")
        optimizer.step()
        optimizer.zero_grad()
        self.look("in_the_end")
        if batch_idx == 1:
            self.zero_grad()


@program(refused=_FSDP | dict.fromkeys(("stage[0-3]", "stage[0-3]_*"), _BOTH), stays=("net.0.*",))
class outside_averaged_in_part(_Looks):
    """It is read after a backward, and another one in `block_backward_sync()`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            self.manual_backward(0.5 * self.loss(batch))
        self.look("after_both")
        self.manual_backward(0.25 * self.loss(batch))
        optimizer.step()
        self.zero_grad()


@program(
    refused={"*": Refusal("RuntimeError", r"in a hook within a backward.*register_post_accumulate_grad_hook")},
    stays=("net.0.*",),
)
class outside_read_in_a_hook(_HeadOnly, Manual):
    """A tensor hook of the head reads it in the second backward of a step."""

    def on_train_start(self) -> None:
        outside: Any = self.net[0].weight  # type: ignore[index]

        def hook(grad: torch.Tensor) -> torch.Tensor:
            return grad if outside.grad is None else grad + outside.grad.mean()

        self.net[2].weight.register_hook(hook)  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for part in (slice(2), slice(2, 4)):
            self.manual_backward(F.mse_loss(self(batch[0][part]), batch[1][part]) / 2)
        optimizer.step()
        self.zero_grad()


class _OnlineProbe(pl.Callback):
    """Trains a linear probe by an optimizer of its own, as for self-supervised learning."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        torch.manual_seed(3)
        pl_module.probe = nn.Linear(16, 4)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.optimizer = torch.optim.Adam(pl_module.probe.parameters(), lr=1e-2)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            features = pl_module.net[:2](batch[0])
        loss = F.mse_loss(pl_module.probe(features), batch[1])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        pl_module.log("online", loss, sync_dist=True)


class _NetOnly(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), self.lr, momentum=0.9)


@program(reference="single")
def outside_and_probed(run: Run) -> None:
    """A callback's linear probe on the module, with an optimizer of its own, after each batch."""
    run.fit(_NetOnly(), callbacks=[_OnlineProbe()])


class _Changes(_Looks):
    """What the optimizer has changes between two backwards of a step."""

    change: Callable[[], None]

    def look_at_both(self, when: str) -> None:
        for at in (0, 2):
            self.look(f"{when}_{at}", at)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if batch_idx == 1:
            self.change()
            optimizer = self.optimizers()
        self.look_at_both("after_one")
        self.manual_backward(self.loss(batch))
        self.look_at_both("after_two")
        optimizer.step()
        self.look_at_both("after_the_step")
        if batch_idx == 2:
            self.zero_grad()


@program()
class leaves_with_a_gradient(_Changes):
    """Another optimizer of the head alone takes the place of that of all: the rest keeps its gradient."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def change(self) -> None:
        self.trainer.optimizers = [torch.optim.SGD(self.net[2].parameters(), 0.1)]  # type: ignore[index]


@program(precision="bf16-true")
class low_leaves_with_a_gradient(leaves_with_a_gradient):
    """The same in bf16-true."""


@program()
class group_leaves_with_a_gradient(_Changes):
    """`optimizer.param_groups.pop(0)`."""

    def configure_optimizers(self) -> Any:
        layers = [{"params": list(self.net[at].parameters())} for at in (0, 2)]  # type: ignore[index]
        return torch.optim.SGD(layers, 0.1, weight_decay=0.1)

    def change(self) -> None:
        self.optimizers().param_groups.pop(0)


@program()
class joins_with_a_gradient(_Changes):
    """An optimizer of all takes the place of that of the head: the others step with what they have."""

    def change(self) -> None:
        self.trainer.optimizers = [torch.optim.SGD(self.parameters(), 0.1)]


@program()
class group_joins_with_a_gradient(_Changes):
    """`optimizer.add_param_group(...)`."""

    def change(self) -> None:
        self.optimizers().add_param_group({"params": list(self.net[0].parameters())})  # type: ignore[index]


@program(precision="bf16-true")
class low_group_joins_with_a_gradient(group_joins_with_a_gradient):
    """The same in bf16-true."""


class _ZeroesThenSteps(_Changes):
    """After the change: gradients are zeroed, and the optimizer steps without another backward."""

    set_to_none = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx == 1 and not self.set_to_none:
            self.change()
        optimizer.zero_grad(set_to_none=self.set_to_none)
        if batch_idx == 1 and self.set_to_none:
            self.change()
        self.look_at_both("zeroed")
        optimizer.step()
        self.look_at_both("after_the_step")
        if batch_idx:
            self.zero_grad()


@program()
class group_joins_and_is_zeroed(_ZeroesThenSteps, group_joins_with_a_gradient):
    """`optimizer.add_param_group(...)`, then zeros: with weight decay, a step with them changes the weights."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2].parameters(), 0.1, momentum=0.9, weight_decay=0.1)  # type: ignore[index]


@program(stays=("net.2.*",))
class group_joins_after_zero_grad(_ZeroesThenSteps, group_joins_with_a_gradient):
    """The group has the only gradients there are: the optimizer steps with these."""

    set_to_none = True


@program()
class group_leaves_and_others_are_zeroed(_ZeroesThenSteps, group_leaves_with_a_gradient):
    """`optimizer.param_groups.pop(0)`, then zeros for those that are left."""


@program(stays=("net.0.*",))
class outside_and_kept(_Looks):
    """It is kept, `kept = param.grad`: later backwards add to that, and an average is in it."""

    kept: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for part in (slice(2), slice(2, 4)):
            self.manual_backward(F.mse_loss(self(batch[0][part]), batch[1][part]) / 2)
            if self.kept is None:
                self.kept = self.net[0].weight.grad  # type: ignore[index]
            self.log(f"kept_{part.start}", self.kept.norm(), sync_dist=True)
        optimizer.step()
        optimizer.zero_grad()
        self.log("in_the_end", self.kept.norm(), sync_dist=True)


class _Keeps(_Changes):
    """The gradient is kept before the change, and only the kept tensor is looked at."""

    kept: Any = None

    def configure_optimizers(self) -> Any:
        layers = [{"params": list(self.net[at].parameters())} for at in (0, 2)]  # type: ignore[index]
        return torch.optim.SGD(layers, 0.1)

    def look_at_both(self, when: str) -> None:
        if self.kept is not None:
            self.log(when, self.kept.norm(), sync_dist=True)

    def change(self) -> None:
        self.kept = self.net[0].weight.grad  # type: ignore[index]
        self.leave()

    def leave(self) -> None:
        raise NotImplementedError


@program()
class leaves_with_a_kept_gradient(_Keeps):
    """A parameter leaves the optimizer for another one; its gradient was kept before."""

    def leave(self) -> None:
        self.trainer.optimizers = [torch.optim.SGD(self.net[2].parameters(), 0.1)]  # type: ignore[index]


@program()
class group_leaves_with_a_kept_gradient(_Keeps):
    """The same by `optimizer.param_groups.pop(0)`."""

    def leave(self) -> None:
        self.optimizers().param_groups.pop(0)
