"""LightningModules whose optimizers update the same parameters."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.programs.base import Manual, step
from tests.programs.fabric_base import fabric_program, loss_of, make_net
from tests.programs.own_optimizers import LARS
from tests.programs.program import COMPILE, Refusal, program
from tests.programs.run import Run, make_strategy

_NO_CLOSURE = {"stage[123]*": Refusal("MisconfigurationException", r"LBFGS.*strategy='zeroplus_stage0'")}


class _Both(Manual):
    """Both optimizers step in each batch, with the same gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        first.step()
        second.step()
        first.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01), torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


@program()
class shared_parameter(_Both):
    """Two optimizers over the same parameters."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr) for lr in (0.1, 0.01)]


@program(on_three_ranks=True, also=COMPILE)
class same_gradient_twice(_Both):
    """Adam and SGD use the same gradient in each batch; each has states of its own."""


@program(precision="bf16-true", reference_precision="bf16-true")
class same_gradient_twice_in_bf16(_Both):
    """The same in bf16."""


@program(reference="single", precision="16-true", without=("fsdp*",))  # there Adam itself is in fp16, and its eps is 0
class same_gradient_twice_in_fp16(_Both):
    """The same in fp16."""


@program({"max_epochs": 2}, reference="single", precision="16-true", without=("fsdp*",))
class shared_gradient_overflows(_Both):
    """Both skip a batch whose gradient is infinite in fp16, also the one that steps later."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        overflows = batch_idx == 1
        if self.trainer.world_size > 1 or not overflows:  # without a loss scale nothing is skipped
            self.manual_backward(self.loss(batch) * (torch.inf if overflows else 1))
        self.clip_gradients(second, 0.5, "norm")
        first.step()
        second.step()
        second.zero_grad()


class _Late(Manual):
    """The first optimizer in the first epoch, the second afterwards; each has a scheduler."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[self.current_epoch > 0]  # type: ignore[index]
        scheduler = self.lr_schedulers()[self.current_epoch > 0]  # type: ignore[index]
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        scheduler.step()
        self.log("lr", optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        both = torch.optim.Adam(self.parameters(), 0.01), torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return list(both), [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in both]


@program(trainer={"max_epochs": 2})
class adam_then_sgd(_Late):
    """Adam in the first epoch and SGD with momentum in the second, each with its scheduler."""


@program()
def adam_then_sgd_resumes(run: Run) -> None:
    """Both have stepped when the fit is saved: it resumes with the states, rates and step counts of both."""
    path = str(Path(run.folder) / "checkpoint")
    first = run.trainer(max_epochs=2)
    first.fit(_Late(), run.loader())
    first.save_checkpoint(path)
    run.fit(_Late(), run.loader(), max_epochs=3, ckpt_path=path)


@program()
def shared_optimizers_resume(run: Run) -> None:
    """The fit is saved while both step in each batch, one of them with decay for some parameters."""
    path = str(Path(run.folder) / "checkpoint")
    first = run.trainer(max_epochs=1)
    first.fit(groups_against_one(), run.loader())
    first.save_checkpoint(path)
    run.fit(groups_against_one(), run.loader(), max_epochs=2, ckpt_path=path)


class _Steps(_Both):
    """Two Adams, of which one steps in every second batch; sizes that no number of ranks divides, and no dimensions."""

    def build(self) -> nn.Module:
        self.scale = nn.Parameter(torch.tensor(1.5))
        net = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4))
        net[2].bias.requires_grad_(False)
        return net

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        first.step()
        if batch_idx % 2:
            second.step()
        second.zero_grad()
        self.log("steps", float(second.optimizer.state[self.scale].get("step", 0)))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01), torch.optim.AdamW(self.parameters(), 0.02, amsgrad=True)


@program(on_three_ranks=True)
def shared_steps_resume(run: Run) -> None:
    """Two Adams with step counts of their own, read, saved and resumed."""
    path = str(Path(run.folder) / "checkpoint")
    run.fit(_Steps(), run.loader(3), max_epochs=1).save_checkpoint(path)
    run.fit(_Steps(), run.loader(3), max_epochs=3, ckpt_path=path)


@program(reference="single", trainer={"max_epochs": 2})
class three_of_one(_Both):
    """Three optimizers of one network, in windows of several backwards, of which one clips and one never zeroes."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        strategy: Any = self.trainer.strategy
        with strategy.coalesce() if hasattr(strategy, "coalesce") else nullcontext():
            for half in zip(*(each.chunk(2) for each in batch), strict=True):
                self.manual_backward(self.loss(half) / 2)
        self.clip_gradients(optimizers[1], 0.2, "norm")
        optimizers[batch_idx % 3].step()
        optimizers[1].step()
        optimizers[batch_idx % 2].zero_grad()

    def configure_optimizers(self) -> Any:
        first, _, last = self.net  # type: ignore[misc]
        return (
            torch.optim.SGD(self.parameters(), 0.05, momentum=0.9),
            torch.optim.RMSprop([*last.parameters(), first.weight], 0.002),
            torch.optim.NAdam(first.parameters(), 0.002, eps=1e-3),
        )


class groups_against_one(_Both):
    """One optimizer has two groups, with and without weight decay, and the other has one group of all parameters."""

    def configure_optimizers(self) -> Any:
        decayed = [param for param in self.parameters() if param.dim() > 1]
        others = [param for param in self.parameters() if param.dim() < 2]
        groups: list[Any] = [{"params": others, "weight_decay": 0.0, "lr": 0.02}, {"params": decayed}]
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9), torch.optim.AdamW(groups, 0.01, weight_decay=0.5)


program()(groups_against_one)


@program()
class overlapping_groups(_Both):
    """Each optimizer has groups that the other's groups cut, and parameters that the other has not."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(second, 0.1, "norm")
        step(second)
        first.step()  # only what the other has not: that was zeroed
        self.manual_backward(self.loss(batch))
        first.step()
        self.zero_grad()

    def configure_optimizers(self) -> Any:
        a, b, c = (list(self.net[index].parameters()) for index in (0, 2, 4))  # type: ignore[index]
        first: list[Any] = [{"params": [*a, b[0]]}, {"params": [b[1]], "lr": 0.02}]
        second: list[Any] = [{"params": [b[0], *c]}, {"params": [a[1]], "betas": (0.5, 0.9)}]
        return torch.optim.SGD(first, 0.05, momentum=0.9), torch.optim.Adam(second, 0.01)


@program(reference="single")
class shared_gradient_is_clipped(_Both):
    """Each optimizer clips the gradient that both use, and the other one steps first."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(first, 0.3, "norm")
        if batch_idx % 2:
            self.clip_gradients(second, 0.05, "value")
        second.step()
        first.step()
        second.zero_grad()


@program()
class switches_late(_Both):
    """The second optimizer joins after some batches in which the gradient was zeroed after the first one's step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        first.step()
        if batch_idx > 1:
            second.step()
        (first if batch_idx % 2 else second).zero_grad()


@program()
class shared_states_by_hand(_Both):
    """The states of each optimizer are read and written by hand; the other's stay."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        first, second = (each.optimizer for each in self.optimizers())  # type: ignore[union-attr]
        weight = self.net[0].weight  # type: ignore[index]
        self.log("exp_avg", first.state[weight]["exp_avg"].norm())
        self.log("steps", float(first.state[weight]["step"]))
        self.log("momentum", second.state[weight]["momentum_buffer"].norm())
        self.log("states", float(len(first.state_dict()["state"]) + 10 * len(second.state_dict()["state"][0])))
        second.state[weight]["momentum_buffer"].mul_(0.5)
        if batch_idx == 2:
            first.state.clear()
            second.param_groups[0]["lr"] = 0.02


@program(reference="ddp_find_unused_parameters_true")
class some_without_gradient(_Both):
    """A layer has no gradient in the first steps of one optimizer, and later in those of the other: none is stepped."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        net: Any = self.net
        out = net["a"](batch[0]) + (net["b"](batch[0]) if batch_idx != 1 else 0)
        self.manual_backward(F.mse_loss(out, batch[1]))
        step(second if batch_idx % 2 else first)


@program(reference="ddp_find_unused_parameters_true")
def some_without_gradient_resumes(run: Run) -> None:
    """The same with two Adams, saved when one has stepped a layer that the other has not."""

    class Adams(some_without_gradient):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01), torch.optim.AdamW(self.parameters(), 0.02)

    path = str(Path(run.folder) / "checkpoint")
    run.fit(Adams(), max_epochs=1).save_checkpoint(path)
    run.fit(Adams(), max_epochs=2, ckpt_path=path)


@program(reference="single")
class some_frozen_for_a_while(_Both):
    """A layer of both is frozen in the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)  # type: ignore[index]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx > 1)  # type: ignore[index]


class _ThenLbfgs(Manual):
    """A physics-informed network's training: Adam first, LBFGS afterwards."""

    adam_epochs = 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        adam, lbfgs = self.optimizers()
        if self.current_epoch < self.adam_epochs:
            adam.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            adam.step()
            self.log("adam", loss, sync_dist=True)
            return

        def closure() -> Tensor:
            lbfgs.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            mean = loss.detach().clone()  # its search is that of the mean, on all ranks
            if dist.is_initialized() and self.trainer.world_size > 1:
                dist.all_reduce(mean)
            return mean / self.trainer.world_size

        lbfgs.step(closure=closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01), torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)


@program(trainer={"max_epochs": 2}, refused=_NO_CLOSURE)
class adam_then_lbfgs(_ThenLbfgs):
    """Adam in the first epoch and LBFGS in the second, as physics-informed networks are trained."""


@program(refused={**_NO_CLOSURE, "fsdp*": Refusal("MisconfigurationException", "LBFGS.*save_weights_only=True")})
def adam_then_lbfgs_resumes(run: Run) -> None:
    """The same, saved in the middle of each part."""
    path = str(Path(run.folder) / "checkpoint")
    for epochs in (1, 2):
        trainer = run.fit(_ThenLbfgs(), max_epochs=epochs, ckpt_path=path if epochs > 1 else None)
        trainer.save_checkpoint(path)
    run.fit(_ThenLbfgs(), max_epochs=3, ckpt_path=path)


@program(without=("stage[123]*", "fsdp*"))  # they refuse optimizers of an earlier fit
def shared_optimizers_twice(run: Run) -> None:
    """The same Adam and LBFGS for a second fit, with their states."""

    class Keeps(_ThenLbfgs):
        def configure_optimizers(self) -> Any:
            self.made = getattr(self, "made", None) or super().configure_optimizers()
            return self.made

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.adam_epochs = batch_idx % 2  # in turns
            super().training_step(batch, batch_idx)

    module = Keeps()
    for _ in range(2):
        run.fit(module)
    run.keep(steps=module.made[0].state[next(module.parameters())]["step"])
    run.keep(evaluations=module.made[1].state[next(module.parameters())]["func_evals"])


@program(trainer={"max_epochs": 2}, refused=_NO_CLOSURE)
class adam_then_lbfgs_with_schedules(_ThenLbfgs):
    """Adam and LBFGS, each with a scheduler, and named parameters."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        scheduler: Any = self.lr_schedulers()[self.current_epoch]  # type: ignore[index]
        scheduler.step()
        self.log("lr", self.optimizers()[self.current_epoch].param_groups[0]["lr"])  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.named_parameters(), 0.01)
        both = adam, torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)
        return list(both), [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in both]


@program(refused=_NO_CLOSURE)
class lbfgs_of_a_part(_ThenLbfgs):
    """LBFGS for one layer, with backwards that give the other layer gradients, too, which Adam uses afterwards."""

    adam_epochs = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        adam, _ = self.optimizers()
        super().training_step(batch, batch_idx)
        self.clip_gradients(adam, 0.5, "norm")
        step(adam)

    def configure_optimizers(self) -> Any:
        first, _, last = self.net  # type: ignore[misc]
        return torch.optim.Adam(first.parameters(), 0.01), torch.optim.LBFGS(last.parameters(), 0.1, max_iter=3)


@program()
class group_added_to_both(_Both):
    """`add_param_group` with a new layer, first on one optimizer, and then on the other."""

    def build(self) -> nn.Module:
        self.late = nn.Linear(8, 8)
        return super().build()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.late(x))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 2):
            optimizer = self.optimizers()[batch_idx - 1]  # type: ignore[index]
            optimizer.add_param_group({"params": list(self.late.parameters()), "lr": 0.02})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.late.zero_grad()

    def configure_optimizers(self) -> Any:
        params = list(self.net.parameters())
        return torch.optim.Adam(params, 0.01), torch.optim.SGD(params, 0.05, momentum=0.9)


#: As DDP runs it in the tests.
_DDP = "ddp_find_unused_parameters_true"
#: Where a fit goes on for an epoch that began under a strategy.
_NEXT = {"stage0": "stage2", "stage1": "stage3", "stage2": "stage0", "stage3": "stage1"}


@program()
def shared_optimizers_move(run: Run) -> None:
    """An epoch at one stage, one at another, and one at the first again, where each saves for the next."""
    path = str(Path(run.folder) / "checkpoint")
    there = _NEXT.get(run.strategy.partition("_")[0], run.strategy)
    run.fit(groups_against_one(), max_epochs=1).save_checkpoint(path)
    run.fit(groups_against_one(), max_epochs=2, strategy=make_strategy(there), ckpt_path=path).save_checkpoint(path)
    run.fit(groups_against_one(), max_epochs=3, ckpt_path=path)


@program()
def shared_optimizers_from_ddp_and_back(run: Run) -> None:
    """A fit under DDP goes on here, and its file of `zp.export` under DDP again."""
    path, one = run.folder / "last.ckpt", run.folder / "one.ckpt"
    run.fit(_Late(), max_epochs=2, strategy=_DDP).save_checkpoint(path)
    trainer = run.fit(_Late(), max_epochs=3, ckpt_path=path)
    trainer.save_checkpoint(path)
    zp.export(path, one, optimizer=True)
    trainer.strategy.barrier()
    run.fit(_Late(), max_epochs=4, strategy=_DDP, ckpt_path=one)


@program()
class shared_by_whole_and_elementwise(_Both):
    """LARS, which needs whole tensors, and Adagrad, whose states begin with the fit, use the same gradient."""

    def configure_optimizers(self) -> Any:
        return LARS(self.parameters(), 0.02), torch.optim.Adagrad(
            self.parameters(), 0.02, initial_accumulator_value=0.1
        )


@program()
def shared_parameters_are_audited(run: Run) -> None:
    """`zp.GradientAudit` of optimizers that use the same gradient, which each of them clips at times."""
    audit = zp.GradientAudit(steps=4)
    run.fit(shared_gradient_is_clipped(), callbacks=[audit])
    run.keep(audited=audit.audited_steps)


@program()
class zeros_of_both(_Both):
    """`zero_grad(set_to_none=False)` of one optimizer, before the other steps with the momentum that it has."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        first.step()
        first.zero_grad(set_to_none=False)
        if batch_idx:
            second.step()
        second.zero_grad()


@program()
class gradient_changed_in_between(_Both):
    """`param.grad` is read and scaled between the steps of two optimizers that use it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.log("norm", self.net[0].weight.grad.norm())  # type: ignore[index]
        first.step()
        for param in self.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)
        self.log("half", self.net[0].weight.grad.norm())  # type: ignore[index]
        second.step()
        second.zero_grad()


@program()
class second_adds_a_backward(_Both):
    """The gradient that one optimizer has used counts in the other's step together with that of another backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        first.step()
        self.manual_backward(self.loss(batch).abs())
        second.step()
        if batch_idx % 2:
            self.zero_grad()


@fabric_program()
def fabric_shared_optimizers(run: Run) -> None:
    """Two optimizers of the same parameters under Fabric, which are saved and loaded."""
    path = str(run.folder / "saved")

    def made() -> Any:
        fabric, net = run.fabric(), make_net()
        both = torch.optim.Adam(net.parameters(), 0.01), torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        return fabric, net, *fabric.setup(net, *both)

    def train(fabric: Any, model: Any, first: Any, second: Any, batches: Any) -> None:
        for batch in batches:
            fabric.backward(loss_of(model, batch))
            fabric.clip_gradients(model, second, max_norm=0.5)
            first.step()
            second.step()
            first.zero_grad()

    batches = list(run.loader(6))
    fabric, _, model, first, second = made()
    train(fabric, model, first, second, batches[:3])
    first.param_groups[0]["lr"], second.param_groups[0]["lr"] = 0.02, 0.03
    fabric.save(path, {"model": model, "first": first, "second": second})
    fabric, net, model, first, second = made()
    run.compare(net)
    fabric.load(path, {"model": model, "first": first, "second": second})
    run.keep(first=first.param_groups[0]["lr"], second=second.param_groups[0]["lr"])
    train(fabric, model, first, second, batches[3:])


@fabric_program(refused={"stage[123]*": _NO_CLOSURE["stage[123]*"]})
def fabric_adam_then_lbfgs(run: Run) -> None:
    """Adam for two batches and LBFGS for two, under Fabric."""
    fabric, net = run.fabric(), make_net()
    run.compare(net)
    made = torch.optim.Adam(net.parameters(), 0.01), torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3)
    model, adam, lbfgs = fabric.setup(net, *made)
    for index, batch in enumerate(run.loader()):

        def closure(batch: Any = batch) -> Tensor:
            model.zero_grad()
            loss = loss_of(model, batch)
            fabric.backward(loss)
            mean: Any = fabric.all_reduce(loss.detach())
            return mean

        if index < 2:
            closure()
            adam.step()
        else:
            lbfgs.step(closure)
