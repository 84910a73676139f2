"""Other optimizers in the middle of training: `trainer.optimizers = [...]`, a second `fabric.setup_optimizers`."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import nn
from torch.optim import Optimizer

import lightning_zeroplus as zp
from tests.programs.base import Manual, Regression, TwoParts, Unfreezes
from tests.programs.fabric_base import adamw, fabric_program, loss_of, make_net, sgd, update
from tests.programs.own_optimizers import LAMB
from tests.programs.program import Refusal, program
from tests.programs.run import Run

_EPOCHS = {"max_epochs": 2}
_LONGER = {"max_epochs": 4}


def _adam(module: nn.Module) -> Optimizer:
    return torch.optim.Adam(module.parameters(), 0.01)


@program(trainer=_EPOCHS)
class optimizers_assigned(Regression):
    """`trainer.optimizers = [...]` with another optimizer, after an epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.AdamW(self.parameters(), 0.01)]


@program(trainer=_EPOCHS, on_three_ranks=True)
class optimizers_assigned_with_states(Regression):
    """The same; the other one has loaded the states of the first."""

    def configure_optimizers(self) -> Any:
        return _adam(self)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            made = torch.optim.AdamW(self.parameters(), 0.02, betas=(0.8, 0.9))
            made.load_state_dict(self.trainer.optimizers[0].state_dict())
            for group in made.param_groups:
                group["lr"] = 0.03
            self.trainer.optimizers = [made]


@program(trainer=_EPOCHS)
class optimizers_made_anew(Regression):
    """`trainer.strategy.setup_optimizers(trainer)` after an epoch, with another learning rate."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.lr = 0.02
            self.trainer.strategy.setup_optimizers(self.trainer)


@program(trainer=_EPOCHS)
class schedulers_made_anew(Regression):
    """`strategy.setup_optimizers(trainer)` after an epoch; each time there is a scheduler, too."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr / 10)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def on_train_epoch_start(self) -> None:
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        if self.current_epoch == 1:
            self.trainer.strategy.setup_optimizers(self.trainer)


@program(trainer=_LONGER)
class optimizers_in_turn(Regression):
    """Adam and SGD take turns by the epoch, as the torch optimizers that the module made; they keep their states."""

    def configure_optimizers(self) -> Any:
        self.both = [_adam(self), torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)]
        return self.both[0]

    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers = [self.both[self.current_epoch % 2]]


@program(trainer={"max_epochs": 3})
class optimizers_put_back(Regression):
    """`before = trainer.optimizers`, others for an epoch, and `trainer.optimizers = before`."""

    def configure_optimizers(self) -> Any:
        return _adam(self)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.before = self.trainer.optimizers
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)]
        elif self.current_epoch == 2:
            self.trainer.optimizers = self.before


@program(reference="ddp_find_unused_parameters_true", trainer=_EPOCHS)
class optimizer_added(TwoParts):
    """`trainer.optimizers = [*trainer.optimizers, another]`: the first one is stepped by a wrapper of before."""

    def configure_optimizers(self) -> Any:
        return _adam(self.net["a"])  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self.current_epoch == 0:
            self.first = self.optimizers()
        if batch_idx == 2 and self.current_epoch == 0:
            self.trainer.optimizers = [*self.trainer.optimizers, torch.optim.SGD(self.net["b"].parameters(), 0.1)]  # type: ignore[index]
        every = self.optimizers()
        second = every[1] if isinstance(every, list) else None
        for optimizer in (self.first, second):
            if optimizer is not None:
                optimizer.zero_grad()
        self.manual_backward(self.use("a", batch) + self.use("b", batch))
        self.first.step()
        if second is not None and batch_idx % 2:
            second.step()


@program(reference="ddp_find_unused_parameters_true", trainer=_EPOCHS)
class optimizer_left_out(TwoParts):
    """Of two optimizers one goes on, and another one takes the place of the first."""

    def configure_optimizers(self) -> Any:
        return [_adam(self.net["a"]), _adam(self.net["b"])], []  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self.current_epoch == 0:
            self.second = self.optimizers()[1]
        if batch_idx == 2 and self.current_epoch == 0:
            other = torch.optim.SGD(self.net["a"].parameters(), 0.1)  # type: ignore[index]
            self.trainer.optimizers = [self.trainer.optimizers[1], other]
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self.use("a", batch) + self.use("b", batch))
        self.second.step()
        for optimizer in self.optimizers():
            if optimizer.optimizer is not self.second.optimizer:
                optimizer.step()


@program(reference="ddp_find_unused_parameters_true", trainer=_EPOCHS)
class one_of_two_goes_on(TwoParts):
    """One optimizer of all weights takes the place of two, each of a part."""

    def configure_optimizers(self) -> Any:
        return [_adam(self.net["a"]), _adam(self.net["b"])], []  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self.current_epoch == 0:
            self.second = self.optimizers()[1]
        if batch_idx == 0 and self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)]
        self.manual_backward(self.use("a", batch) + self.use("b", batch))
        every = self.optimizers()
        for optimizer in every if isinstance(every, list) else [every]:
            optimizer.step()
            optimizer.zero_grad()


@program(trainer=_EPOCHS)
class optimizers_of_the_same_weights_added(Manual):
    """A second optimizer of the same weights is added, and both take turns by the batch."""

    def configure_optimizers(self) -> Any:
        return _adam(self)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.current_epoch == 0:
            self.trainer.optimizers = [*self.trainer.optimizers, torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)]
        every = self.optimizers()
        optimizer = every[batch_idx % 2] if isinstance(every, list) else every
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@program(trainer=_EPOCHS)
class optimizers_assigned_before_the_step(Manual):
    """Another optimizer steps with gradients that were there when it was assigned."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        if batch_idx == 1:
            with torch.no_grad():
                self.log("before", self.loss(batch), sync_dist=True)
            self.trainer.optimizers = [_adam(self)]
        self.manual_backward(self.loss(batch) / 2)
        self.optimizers().step()


@program(trainer=_EPOCHS | {"gradient_clip_val": 0.2, "accumulate_grad_batches": 2})
class optimizers_assigned_while_accumulating(Regression):
    """Another optimizer is assigned between two micro-batches of a step that clips."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.current_epoch == 0:
            self.trainer.optimizers = [_adam(self)]


@program(trainer=_EPOCHS)
class whole_tensor_optimizer_assigned(Regression):
    """LAMB, which needs whole tensors, takes the place of SGD; then Adagrad."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [LAMB(self.parameters(), 0.01)]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.Adagrad(self.parameters(), 0.05)]


@program(reference="single", trainer={"max_epochs": 3})
class unfrozen_after_assigning(Unfreezes):
    """Another optimizer is assigned while a layer is frozen, which is unfrozen later."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.current_epoch == 0:
            self.trainer.optimizers = [_adam(self)]


@program(trainer=_EPOCHS, precision="bf16-true")
class optimizers_assigned_in_bf16(optimizers_assigned):
    """`trainer.optimizers = [...]` with another optimizer, after an epoch, in bf16-true."""


@program(bound=1e-6)
def assigned_under_callbacks(run: Run) -> None:
    """Another optimizer, with `zp.EMA`, `GradientAudit` and `LearningRateMonitor`."""
    average = zp.EMA(0.8)
    callbacks = [average, zp.GradientAudit(), LearningRateMonitor("step")]
    run.fit(optimizers_assigned(), max_epochs=2, callbacks=callbacks)


@program(trainer=_EPOCHS)
class part_assigned(Regression):
    """After an epoch, an optimizer of the last layer only; the groups of another one are read and written."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            groups = [{"params": self.net[2].weight, "lr": 0.01}, {"params": self.net[2].bias}]  # type: ignore[index]
            self.trainer.optimizers = [torch.optim.AdamW(groups, 0.02)]

    def on_train_batch_end(self, *unused: Any) -> None:
        groups = self.trainer.optimizers[0].param_groups
        groups[0]["lr"] *= 0.9
        self.log("sizes", float(sum(param.numel() for group in groups for param in group["params"])))


@program()
def resumed_with_an_assigned_optimizer(run: Run) -> None:
    """A checkpoint after `trainer.optimizers = [...]` is resumed by a module that has this optimizer."""

    class Assigns(Regression):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.optimizers = [_adam(self)]

    class HasAdam(Regression):
        def configure_optimizers(self) -> Any:
            return _adam(self)

    trainer = run.fit(Assigns(), max_epochs=2)
    trainer.save_checkpoint(run.folder / "last.ckpt")
    run.fit(HasAdam(), max_epochs=3, ckpt_path=str(run.folder / "last.ckpt"))


@program()
class replaced_torch_optimizer_steps(Manual):
    """The torch optimizer that another one has replaced is stepped again, by itself, with a scheduler."""

    def configure_optimizers(self) -> Any:
        self.before = _adam(self)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.before, 0.8)
        return self.before

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)]
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        (self.before if batch_idx == 2 else self.optimizers()).step()
        self.schedule.step()


@program()
class replaced_states_read(Manual):
    """The states of an optimizer that another one has replaced are read, and written."""

    def configure_optimizers(self) -> Any:
        return _adam(self)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            before = self.trainer.optimizers
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)]
            moment = before[0].state[self.net[0].weight]["exp_avg"]  # type: ignore[index]
            self.log("moment", moment.abs().sum())
            moment.zero_()
            self.trainer.optimizers = before
        super().training_step(batch, batch_idx)


@program(trainer={"gradient_clip_val": 0.1})
class replaced_optimizer_clips(Regression):
    """The wrapper of a replaced optimizer zeroes gradients, and the module clips those of its weights itself."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.before = self.optimizers()
        if batch_idx == 1:
            self.trainer.optimizers = [_adam(self)]

    def configure_gradient_clipping(self, optimizer: Any, **unused: Any) -> None:
        self.clip_gradients(optimizer, 0.1, "norm")

    def on_train_batch_end(self, *unused: Any) -> None:
        self.before.zero_grad()


@program()
class replaced_optimizer_steps(Manual):
    """An optimizer that another one has replaced is stepped again, beside it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.before = self.optimizers()
        if batch_idx == 1:
            self.trainer.optimizers = [_adam(self)]
        for optimizer in (self.before, self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


@fabric_program()
def fabric_sets_up_two_of_the_same_weights(run: Run) -> None:
    """`first, second = fabric.setup_optimizers(...)` for a module that was set up before; they take turns."""
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    model = fabric.setup_module(net)
    both = fabric.setup_optimizers(adamw(net), sgd(net))
    for index, batch in enumerate(run.loader()):
        fabric.backward(loss_of(model, batch))
        update(both[index % 2])


@fabric_program()
def fabric_sets_up_each_part(run: Run) -> None:
    """An optimizer for each of two layers, set up apart; the second steps every other time, with a clip."""
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    model = fabric.setup_module(net)
    first, second = fabric.setup_optimizers(adamw(net[0]), sgd(net[2]))
    for index, batch in enumerate(run.loader()):
        fabric.backward(loss_of(model, batch))
        update(first)
        if index % 2:
            run.keep(norm=fabric.clip_gradients(model, second, max_norm=0.1))
            update(second)


@fabric_program()
def fabric_changes_its_optimizer(run: Run) -> None:
    """AdamW, set up with the module, and SGD from `fabric.setup_optimizers` for the second half."""
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    model, optimizer = fabric.setup(net, adamw(net))
    for _ in range(2):
        for batch in run.loader():
            fabric.backward(loss_of(model, batch))
            update(optimizer)
        optimizer = fabric.setup_optimizers(sgd(net))


@fabric_program()
def fabric_adds_an_optimizer(run: Run) -> None:
    """SGD is set up for a model that has AdamW; then both take turns, by the wrappers that Fabric returned."""
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    model, first = fabric.setup(net, adamw(net))
    second = None
    for epoch in range(3):
        for index, batch in enumerate(run.loader()):
            optimizer = first if second is None or index % 2 else second
            for each in (first, second):
                if each is not None:
                    each.zero_grad()
            fabric.backward(loss_of(model, batch))
            optimizer.step()
            first.param_groups[0]["lr"] *= 0.9
        if epoch == 0:
            second = fabric.setup_optimizers(sgd(net))


@fabric_program()
def fabric_saves_an_added_optimizer(run: Run) -> None:
    """Two optimizers that were set up one after the other are saved, and loaded into two set up at once."""
    fabric = run.fabric()
    net = make_net()
    model = fabric.setup_module(net)
    first, second = fabric.setup_optimizers(adamw(net[0])), fabric.setup_optimizers(sgd(net[2]))
    for batch in run.loader():
        fabric.backward(loss_of(model, batch))
        update(first)
        update(second)
    fabric.save(run.folder / "both.ckpt", {"model": model, "first": first, "second": second})
    again = make_net()
    run.compare(again)
    model, first, second = fabric.setup(again, adamw(again[0]), sgd(again[2]))
    fabric.load(run.folder / "both.ckpt", {"model": model, "first": first, "second": second})
    for batch in run.loader():
        fabric.backward(loss_of(model, batch))
        update(first)
        update(second)


class _Edits(Regression):
    """After an epoch, the groups of the only optimizer are edited, as torch's own lists and dicts can be."""

    def configure_optimizers(self) -> Any:
        head = {"params": list(self.net[2].parameters()), "lr": 0.02}  # type: ignore[index]
        return torch.optim.Adam([{"params": list(self.net[0].parameters())}, head], 0.01)  # type: ignore[index]

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.edit(self.trainer.optimizers[0])
        self.log("params", float(sum(len(group["params"]) for group in self.trainer.optimizers[0].param_groups)))

    def edit(self, optimizer: Any) -> None:
        raise NotImplementedError


@program(trainer=_EPOCHS)
class group_taken_out(_Edits):
    """`optimizer.param_groups.pop(0)`: its parameters are trained no longer."""

    def edit(self, optimizer: Any) -> None:
        optimizer.param_groups.pop(0)


@program(trainer={"max_epochs": 3})
class group_filtered(_Edits):
    """`group["params"] = [p for p in group["params"] if ...]`, and all of them again an epoch later."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 2:
            self.trainer.optimizers[0].param_groups[0]["params"] = list(self.net[0].parameters())  # type: ignore[index]

    def edit(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param.ndim > 1]


@program(trainer=_EPOCHS)
class parameter_moved(_Edits):
    """A parameter is moved from one group's list to another's, which has been kept since the first epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0:
            self.groups = self.trainer.optimizers[0].param_groups
        super().on_train_epoch_start()

    def edit(self, optimizer: Any) -> None:
        self.groups[1]["params"].append(self.groups[0]["params"].pop())


@program(trainer=_EPOCHS)
class groups_appended(Regression):
    """A frozen layer is unfrozen, and its group appended to `optimizer.param_groups`."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2].parameters(), 0.1, momentum=0.9)  # type: ignore[index]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.current_epoch == 0:
            groups = self.trainer.optimizers[0].param_groups
            groups.append({**groups[0], "params": list(self.net[0].parameters()), "lr": 0.02})  # type: ignore[index]
            self.zero_grad()


@program()
class groups_edited_before_the_step(Manual):
    """Between a backward and its step a group is taken out, and later given back, with a gradient from before."""

    def configure_optimizers(self) -> Any:
        head = {"params": list(self.net[2].parameters()), "lr": 0.02}  # type: ignore[index]
        return torch.optim.SGD([{"params": list(self.net[0].parameters())}, head], 0.1, momentum=0.9)  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        self.manual_backward(self.loss(batch))
        if batch_idx == 1:
            self.out = dict(optimizer.param_groups.pop(0))
        if batch_idx == 2:
            optimizer.param_groups.append(self.out)
        self.optimizers().step()
        self.zero_grad()


@program(trainer=_EPOCHS)
class groups_of_one_edited(TwoParts):
    """The list of the second optimizer's parameters is edited, of two."""

    def configure_optimizers(self) -> Any:
        return _adam(self.net["a"]), torch.optim.SGD(self.net["b"].parameters(), 0.1, momentum=0.9)  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        both = self.optimizers()
        if batch_idx == 2 and self.current_epoch == 0:
            del both[1].param_groups[0]["params"][0]
        for optimizer in both:
            optimizer.zero_grad()
        self.manual_backward(self.use("a", batch) + self.use("b", batch))
        for optimizer in both:
            optimizer.step()


class _Lends(TwoParts):
    """Two optimizers; in the third batch, the second one gets a weight of the first one's."""

    def configure_optimizers(self) -> Any:
        return _adam(self.net["a"]), torch.optim.SGD(self.net["b"].parameters(), 0.1, momentum=0.9)  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        both = self.optimizers()
        if batch_idx == 2:
            both[1].add_param_group({"params": [self.net["a"].weight], "lr": 0.03})  # type: ignore[index]
        self.manual_backward(self.use("a", batch) + self.use("b", batch))
        for optimizer in both:
            optimizer.step()
        for optimizer in both:
            optimizer.zero_grad()
        self.log("lr", both[1].param_groups[-1]["lr"])


@program(trainer=_EPOCHS)
class group_of_the_other_added(_Lends):
    """`add_param_group` gives the second of two optimizers a weight of the first one's."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.training_step = self.same_group  # type: ignore[method-assign]

    def same_group(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, 0)


@program(trainer=_EPOCHS)
class part_of_a_shared_group_added(group_of_the_other_added):
    """`add_param_group` gives the second of two optimizers, which share another weight already, one of the first's."""

    def configure_optimizers(self) -> Any:
        shared = [self.net["a"].bias, *self.net["b"].parameters()]  # type: ignore[index]
        first = torch.optim.AdamW(self.net.parameters(), 0.01)
        return first, torch.optim.SGD(shared, 0.1, momentum=0.9)


@program()
class assigned_torch_optimizer_steps(Manual):
    """The assigned torch optimizer is stepped, and zeroed, by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.own = LAMB(self.parameters(), 0.01)
            self.trainer.optimizers = [self.own]
        optimizer = self.own if batch_idx else self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) / 2)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@program(reference="single", refused={"*": Refusal("ValueError", "when the fit began.*before the fit")})
class new_parameter_assigned(Regression):
    """An assigned optimizer has a parameter that the module did not have when the fit began."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.net[2] = nn.Linear(16, 4, device=self.device)  # type: ignore[index]
            self.trainer.optimizers = [_adam(self)]


@program(without=("stage[123]*", "fsdp*"))  # there, an optimizer of an earlier fit is refused
def replaced_optimizer_in_another_fit(run: Run) -> None:
    """An optimizer that another one has replaced is returned to a second fit, and goes on with its states."""
    module = optimizers_in_turn()
    run.fit(module, max_epochs=2)
    module.configure_optimizers = lambda: module.both[0]  # type: ignore[method-assign]
    module.on_train_epoch_start = lambda: None  # type: ignore[method-assign]
    run.fit(module, max_epochs=1)
