"""Optimizers: torch's, and users' own; settings that are changed on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_zeroplus as zp
from tests.programs.base import Manual, Regression, Unfreezes, step
from tests.programs.own_optimizers import LAMB, LARS, SOAP, ForeachSigns, Lion, Lookahead
from tests.programs.program import Refusal, program
from tests.programs.run import Run

_FOUR_EPOCHS = {"max_epochs": 2}


def _optimizer(name: str, what: str, make: Callable[[Any], Optimizer], **details: Any) -> None:
    """A program that trains with one optimizer."""

    class Trains(Regression):
        def configure_optimizers(self) -> Any:
            return make(self.parameters())

    Trains.__name__, Trains.__doc__, Trains.__module__ = name, what, __name__
    program(_FOUR_EPOCHS, **details)(Trains)


_optim = torch.optim
_optimizer("nesterov", "SGD with Nesterov's momentum and decay.", lambda p: _optim.SGD(p, 0.05, 0.9, 0, 0.1, True))
_optimizer("amsgrad", "AdamW with AMSGrad.", lambda p: _optim.AdamW(p, 0.01, amsgrad=True))
_optimizer(
    "rmsprop", "RMSprop, centred, with momentum.", lambda p: _optim.RMSprop(p, 0.005, momentum=0.5, centered=True)
)
_optimizer("nadam", "NAdam.", lambda p: _optim.NAdam(p, 0.01), on_three_ranks=True)
_optimizer(
    "radam",
    "RAdam with decoupled decay.",
    lambda p: _optim.RAdam(p, 0.05, weight_decay=0.1, decoupled_weight_decay=True),
)
_optimizer("adamax", "Adamax.", lambda p: _optim.Adamax(p, 0.01))
_optimizer("adadelta", "Adadelta.", lambda p: _optim.Adadelta(p, 1.0))
_optimizer("rprop", "Rprop, by signs of gradients.", lambda p: _optim.Rprop(p, 0.01))
_optimizer("rprop_foreach", "Rprop with `foreach=True`.", lambda p: _optim.Rprop(p, 0.01, foreach=True))
_optimizer("foreach_signs", "Signs of a moment, by `torch._foreach_*`.", lambda p: ForeachSigns(p, 0.003))
_optimizer("adagrad", "Adagrad with decay of its learning rate.", lambda p: _optim.Adagrad(p, 0.1, lr_decay=0.1))
_optimizer("lion", "Lion, an optimizer of the user's own.", lambda p: Lion(p, 0.003))
_optimizer("maximizing", "SGD with `maximize=True`.", lambda p: _optim.SGD(p, 0.005, maximize=True))
_optimizer("adam_one_by_one", "Adam with `foreach=False`.", lambda p: _optim.Adam(p, 0.01, foreach=False))
_optimizer("adam_fused", "AdamW with `fused=True`.", lambda p: _optim.AdamW(p, 0.01, fused=True))
_optimizer("lars", "LARS: a learning rate per tensor, by norms.", lambda p: LARS(p, 0.1))
_optimizer(
    "lamb",
    "LAMB: Adam's update, scaled per tensor.",
    lambda p: LAMB(p, 0.02),
    on_three_ranks=True,
)
_optimizer(
    "adafactor",
    "torch's Adafactor: rows and columns.",
    lambda p: _optim.Adafactor(p, 0.05),
    on_three_ranks=True,
)
_optimizer("soap", "SOAP: Adam in the eigenbasis of rows.", lambda p: SOAP(p, 0.01), bound=1e-4)
_optimizer("lookahead", "Lookahead around SGD.", lambda p: Lookahead(_optim.SGD(p, 0.1)), without=("stage*",))


@program(_FOUR_EPOCHS)
class muon(Regression):
    """torch's Muon, for a network of matrices."""

    def build(self) -> torch.nn.Module:
        linear = torch.nn.Linear
        return torch.nn.Sequential(linear(8, 16, bias=False), torch.nn.Tanh(), linear(16, 4, bias=False))

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon(self.parameters(), 0.02)


@program(_FOUR_EPOCHS, on_three_ranks=True)
class adagrad_with_schedule(Regression):
    """Adagrad whose learning rate a schedule halves after every epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adagrad(self.parameters(), 0.2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)]


@program(_FOUR_EPOCHS, on_three_ranks=True)
class adagrad_with_groups(Regression):
    """Adagrad with two groups of other learning rates."""

    def configure_optimizers(self) -> Any:
        first, head = self.net[0], self.net[2]  # type: ignore[index]
        return torch.optim.Adagrad([{"params": first.parameters()}, {"params": head.parameters(), "lr": 0.01}], 0.2)


@program()
class learning_rate_by_hand(Manual):
    """`group["lr"] = ...` before each step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (batch_idx + 1)
        step(optimizer)


@program(trainer={"max_epochs": 2})
class warm_up_in_optimizer_step(Regression):
    """The `optimizer_step` hook of Lightning's docs: a warm-up by hand, then the step with its closure."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        scale = min(1.0, (self.trainer.global_step + 1) / 5)
        for group in optimizer.param_groups:
            group["lr"] = scale * self.lr


@program(trainer={"max_epochs": 2})
class every_second_step(Regression):
    """`optimizer_step` steps for every second batch, and only evaluates the closure for the others."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


@program(trainer={"max_epochs": 2})
class zero_grad_of_ones_own(Regression):
    """`optimizer_zero_grad` with `set_to_none=False`."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@program(_FOUR_EPOCHS)
class schedule_of_epochs_and_momentum(Regression):
    """CyclicLR, which moves momentum, with a step per batch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@program(reference="single")
def unfrozen_later(run: Run) -> None:
    """A layer that is frozen in `__init__` and in the optimizer, and unfrozen after an epoch."""

    class WithAdamW(Unfreezes):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.1)

    run.fit(WithAdamW(), run.loader(2), max_epochs=3)


class _Assigns(Regression):
    """The head is in a group; after an epoch the optimizer is given other groups."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)  # type: ignore[index]

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)  # type: ignore[index]
            optimizer = self.trainer.optimizers[0]
            optimizer.param_groups = self.assigned(optimizer.param_groups)

    def assigned(self, groups: list[Any]) -> list[Any]:
        return [groups[0], {**groups[0], "params": list(self.net[0].parameters()), "lr": 0.05}]  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2].parameters(), 0.1, momentum=0.9)  # type: ignore[index]


@program(reference="single")
def groups_assigned(run: Run) -> None:
    """`optimizer.param_groups = [...]` with one more group than there was."""
    run.fit(_Assigns(), run.loader(2), max_epochs=3)


@program(reference="single")
def groups_exchanged(run: Run) -> None:
    """`optimizer.param_groups = [...]` with other parameters."""

    class Exchanges(_Assigns):
        def assigned(self, groups: list[Any]) -> list[Any]:
            return super().assigned(groups)[::-1]

    run.fit(Exchanges(), run.loader(2), max_epochs=3)


@program(reference="single")
def lamb_unfrozen_later(run: Run) -> None:
    """LAMB, with weights clamped by hand, a layer without a gradient at times, and one that is unfrozen."""

    class WithLamb(Manual, Unfreezes):
        def __init__(self) -> None:
            super().__init__()
            self.beside = torch.nn.Linear(8, 4)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            out = self(batch[0]) + (self.beside(batch[0]) if batch_idx != 1 else 0)
            self.manual_backward(F.mse_loss(out, batch[1]))
            step(self.optimizers())
            with torch.no_grad():
                for param in self.parameters():
                    param.clamp_(-0.6, 0.6)

        def configure_optimizers(self) -> Any:
            return LAMB(self.parameters(), 0.02)

    run.fit(WithLamb(), run.loader(3), max_epochs=2)


@program(reference="single")
def lamb_never_zeroed(run: Run) -> None:
    """LAMB without `zero_grad()`: gradients add up over the steps."""

    class NeverZeroes(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.optimizers().step()

        def configure_optimizers(self) -> Any:
            return LAMB(self.parameters(), 0.02)

    run.fit(NeverZeroes())


@program(reference="single")
def frozen_while_another_is_unfrozen(run: Run) -> None:
    """A layer that is frozen in the epoch in which another one is unfrozen: its optimizer state is there afterwards."""

    class Swaps(Unfreezes):
        def on_train_epoch_start(self) -> None:
            super().on_train_epoch_start()
            self.net[2].requires_grad_(self.current_epoch != 1)  # type: ignore[index]

        def configure_optimizers(self) -> Any:
            return torch.optim.Adagrad(self.parameters(), 0.1)

    run.fit(Swaps(), run.loader(2), max_epochs=3)


@program(reference="single")
def unfrozen_after_gradients_were_cleared(run: Run) -> None:
    """`p.grad = None` for all, and then a layer is unfrozen: the cleared gradients do not come back."""

    class Clears(Manual):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)  # type: ignore[index]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            if batch_idx == 1:
                for param in self.parameters():
                    param.grad = None
                self.net[0].requires_grad_(True)  # type: ignore[index]
            else:
                step(self.optimizers())

    run.fit(Clears(), run.loader(4))


@program(reference="single")
def group_added_later(run: Run) -> None:
    """A layer that is frozen at first, unfrozen after an epoch, and added by `add_param_group`."""

    class Adds(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)  # type: ignore[index]

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[0].requires_grad_(True)  # type: ignore[index]
                optimizer: Any = self.optimizers()
                optimizer.add_param_group({"params": list(self.net[0].parameters()), "lr": 0.05})  # type: ignore[index]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net[2].parameters(), 0.1, momentum=0.9)  # type: ignore[index]

    run.fit(Adds(), run.loader(2), max_epochs=3)


@program()
class two_learning_rates_two_steps(Manual):
    """Two steps per batch, each with a backward and another learning rate."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for lr in (0.1, 0.01):
            optimizer.param_groups[0]["lr"] = lr
            loss: Tensor = self.loss(batch)
            self.manual_backward(loss)
            step(optimizer)
            self.log(f"loss_{lr}", loss, sync_dist=True)


@program()
class state_read(Manual):
    """The optimizer's own state is logged: how many steps AdamW has counted."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        step(optimizer)
        with zp.gathered(self):
            counted = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
        self.log("counted", max(counted))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


@program()
class GroupKeptByTheUser(Manual):
    """A group is kept from the first batch on, and its learning rate is set after a look at the states."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        if batch_idx == 0:
            self.group = optimizer.param_groups[0]
        self.manual_backward(self.loss(batch))
        step(optimizer)
        assert len(optimizer.state) == 4
        self.group["lr"] *= 0.5

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.05)


@program()
class StepThatRaises(Manual):
    """A step raises once, and is caught: nothing has changed, as a look at the optimizer shows, and the fit goes on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if batch_idx != 1:
            optimizer.step()
            return
        before = _values(optimizer)
        group = optimizer.param_groups[0]
        rate = group.pop("lr")
        with contextlib.suppress(KeyError):
            optimizer.step()
            raise AssertionError("the step must raise")
        group["lr"] = rate
        held = {id(param) for each in optimizer.param_groups for param in each["params"]}
        assert held == {id(param) for param in self.parameters()}, "the optimizer has other parameters"
        assert before and all(map(torch.equal, before, _values(optimizer)))

    def configure_optimizers(self) -> Any:
        first, second = self.net[0].parameters(), self.net[2].parameters()  # type: ignore[index]
        return torch.optim.Adam([{"params": first}, {"params": second, "lr": 0.02}], 0.05)


def _values(optimizer: Any) -> list[Tensor]:
    """Copies of all states."""
    states = optimizer.state_dict()["state"].values()
    return [value.clone() for state in states for value in state.values() if isinstance(value, Tensor)]


@program(refused={"*": Refusal("MisconfigurationException", r"'net.0.weight' twice in a group.*dict.fromkeys")})
class tied_twice_in_a_group(Regression):
    """Two layers with the same weight, in one group: torch warns, and steps the weight twice."""

    def build(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
        net[1].weight = net[0].weight
        return net

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([param for layer in self.net for param in layer.parameters()], 0.02)  # type: ignore


class _CountsInGroups(torch.optim.Optimizer):
    """Adam whose groups count the steps, and whose rate falls with them, as in Schedule-Free and pytorch_optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["sum"] = group.get("sum", 0.0) + group["lr"] ** 2
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                    moment.lerp_(param.grad, 0.1)
                    rate = group["lr"] / (1 - 0.9 ** group["step"]) * group["lr"] ** 2 / (group["sum"] or 1.0)
                    param.add_(moment.sign() * moment.abs().sqrt(), alpha=-rate)
        return loss


@program({"max_epochs": 2}, on_three_ranks=True)
class steps_counted_in_groups(Regression):
    """Two groups, which count steps: the optimizer has no such states by parameter."""

    def configure_optimizers(self) -> Any:
        vectors = [param for param in self.parameters() if param.ndim == 1]
        matrices = [param for param in self.parameters() if param.ndim > 1]
        return _CountsInGroups([{"params": vectors}, {"params": matrices, "lr": 0.1}], 0.05)

    def on_train_batch_end(self, *args: Any) -> None:
        for number, group in enumerate(self.trainer.optimizers[0].param_groups):
            self.log(f"steps_{number}", float(group["step"]))


@program(on_three_ranks=True)
def steps_counted_in_groups_resumed(run: Run) -> None:
    """The same, resumed."""
    run.fit(steps_counted_in_groups()).save_checkpoint(run.folder / "one.ckpt")
    run.fit(steps_counted_in_groups(), max_epochs=2, ckpt_path=run.folder / "one.ckpt")


@program({"max_epochs": 2})
class steps_counted_by_the_optimizer(Regression):
    """Two groups, and an optimizer that counts its steps in an attribute."""

    def configure_optimizers(self) -> Any:
        class Counts(torch.optim.Optimizer):
            steps = 0

            def step(self, closure: Any = None) -> Any:  # type: ignore[override]
                loss = None if closure is None else torch.enable_grad()(closure)()
                self.steps += 1
                with torch.no_grad():
                    for group in self.param_groups:
                        for param in group["params"]:
                            param.sub_(param.grad, alpha=group["lr"] / self.steps)
                return loss

        vectors = [param for param in self.parameters() if param.ndim == 1]
        matrices = [param for param in self.parameters() if param.ndim > 1]
        return Counts([{"params": vectors}, {"params": matrices, "lr": 0.1}], {"lr": 0.05})


class _Clips(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 0.1)
        super().step()
        return loss


class _Estimates(torch.optim.Optimizer):
    """A learning rate that grows with what all gradients have in common, as in D-Adaptation."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                sums = self.state[param].setdefault("sums", torch.zeros_like(param))
                group["estimate"] = group.get("estimate", 0.01) + 0.01 * float((sums * param.grad).sum())
                sums.add_(param.grad)
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["estimate"])
        return loss


_COUPLED = {f"stage{stage}*": Refusal("MisconfigurationException", "gradients of others") for stage in (1, 2, 3)}


@program({"max_epochs": 2}, refused=_COUPLED)
class clips_within_its_step(Regression):
    """An optimizer that clips by the norm of all gradients within its step."""

    def configure_optimizers(self) -> Any:
        return _Clips(self.parameters(), self.lr, momentum=0.9)


@program({"max_epochs": 2}, refused=_COUPLED)
class estimates_from_all_gradients(Regression):
    """An optimizer that estimates one learning rate from all gradients, as Prodigy and D-Adaptation do."""

    def configure_optimizers(self) -> Any:
        return _Estimates(self.parameters(), {})


class _ScheduleFree(torch.optim.Optimizer):
    """Defazio et al., 2024: the weights are the average in evaluation, and between it and `z` in training."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

        self.beta = 0.9

    @torch.no_grad()
    def train(self) -> None:
        self._move(True, 1 - self.beta)

    @torch.no_grad()
    def eval(self) -> None:
        self._move(False, 1 - 1 / self.beta)

    def _move(self, train_mode: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight)
            group["train_mode"] = train_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert self.param_groups[0]["train_mode"]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                z = self.state[param].setdefault("z", param.clone())
                average = param.lerp(z, 1 - 1 / 0.9)
                z.sub_(param.grad, alpha=group["lr"])
                param.copy_(average.lerp_(z, 1 / group["k"]).lerp(z, 0.1))
        return loss


class _Modes(Regression):
    def modes(self) -> Any:
        return self.optimizers()

    def on_train_epoch_start(self) -> None:
        self.modes().train()

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.modes().eval()

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.modes().train()

    def on_train_end(self) -> None:
        self.modes().eval()

    def configure_optimizers(self) -> Any:
        vectors = [param for param in self.parameters() if param.ndim == 1]
        matrices = [param for param in self.parameters() if param.ndim > 1]
        self.own = _ScheduleFree([{"params": vectors}, {"params": matrices, "lr": 0.1}], 0.2)
        return self.own


@program(on_three_ranks=True)
def trains_and_evaluates(run: Run) -> None:
    """Schedule-Free: `self.optimizers().train()` and `.eval()` move the weights around validation."""
    run.fit(_Modes(), val=run.loader(2), max_epochs=3)


@program()
def trains_and_evaluates_itself(run: Run) -> None:
    """The same with the optimizer that the module has kept."""

    class Own(_Modes):
        def modes(self) -> Any:
            return self.own

    run.fit(Own(), val=run.loader(2), max_epochs=3)


@program({"max_epochs": 2}, reference="ddp_find_unused_parameters_true")
class two_train_and_evaluate(Manual):
    """Two of them in a manual loop; one is evaluated after each batch."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})

    def on_train_epoch_start(self) -> None:
        for optimizer in self.optimizers():
            optimizer.train()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for name, optimizer in zip("ab", self.optimizers(), strict=True):
            self.manual_backward(F.mse_loss(self.net[name](batch[0]), batch[1]))  # type: ignore[index]
            step(optimizer)
        optimizer.eval()
        self.log("loss", F.mse_loss(self.net["b"](batch[0]), batch[1]), sync_dist=True)  # type: ignore[index]
        optimizer.train()

    def configure_optimizers(self) -> Any:
        return [_ScheduleFree(self.net[name].parameters(), 0.2) for name in "ab"]  # type: ignore[index]
