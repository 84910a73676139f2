"""What comes with the Trainer and with optimizers: tuners, schedules, wrappers, unusual answers."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from torch import Tensor, nn

from tests.programs.base import Manual, Regression
from tests.programs.program import Refusal, program
from tests.programs.refusals import NOTHING_TO_TRAIN, SPARSE
from tests.programs.run import Run


class _Adam(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr)


@program()
def learning_rate_finder(run: Run) -> None:
    """`LearningRateFinder`, then the fit at the rate that it suggests."""
    module = _Adam()
    run.fit(module, run.loader(8), callbacks=[LearningRateFinder(1e-3, 1e-1, num_training_steps=6)])
    run.keep(lr=module.lr)


@program()
def tuner_lr_find(run: Run) -> None:
    """`Tuner.lr_find`, and a fit with the same Trainer."""
    module = _Adam()
    trainer = run.trainer()
    run.compare(module)
    pl.tuner.Tuner(trainer).lr_find(module, run.loader(8), min_lr=1e-3, max_lr=1e-1, num_training=6)
    trainer.fit(module, run.loader(8))
    run.keep(lr=module.lr)


@program(trainer={"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})], "max_epochs": 2})
class gradient_accumulation_scheduler(_Adam):
    """`GradientAccumulationScheduler`: no accumulation, then over two batches."""


@program()
def stochastic_weight_averaging(run: Run) -> None:
    """`StochasticWeightAveraging` over the last half of the epochs."""
    run.fit(_Adam(), max_epochs=4, callbacks=[StochasticWeightAveraging(0.05, 0.5, 1)])


@program()
def averages_statistics(run: Run) -> None:
    """`StochasticWeightAveraging` of a module with BatchNorm, whose statistics one more epoch makes anew."""

    class Normalized(_Adam):
        def build(self) -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))

        def on_train_epoch_start(self) -> None:
            if self.trainer.fit_loop._skip_backward:  # else the last step takes the gradients of the epoch before
                self.zero_grad()

    run.fit(Normalized(), max_epochs=4, callbacks=[StochasticWeightAveraging(0.05, 1, 1)])


@program(trainer={"max_epochs": 2})
class two_schedulers(_Adam):
    """One optimizer with two schedulers, one per step and one per epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        by_step = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]


@program(stays=("*",))
class no_optimizer(Regression):
    """`configure_optimizers` returns None."""

    def configure_optimizers(self) -> Any:
        return None


@program({"max_epochs": 2})
class descends_by_hand(Manual):
    """`configure_optimizers` returns None, and `training_step` subtracts the gradients from the weights itself."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss)
        with torch.no_grad():
            for param in self.parameters():
                param.sub_(0.1 * param.grad)  # type: ignore[arg-type]
                param.grad = None
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return None


@program(stays=("*",), reference="single", refused={"stage[123]*": NOTHING_TO_TRAIN})
class nothing_to_train(Manual):
    """Every parameter is frozen, and nothing is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return None


@program(stays=("*",), precision="bf16-mixed")
class no_optimizer_in_bf16_mixed(no_optimizer):
    """`configure_optimizers` returns None, in bf16-mixed."""


@program(stays=("*",))
class no_optimizer_of_a_late_model(no_optimizer):
    """`configure_optimizers` returns None, and `configure_model` makes the network."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = self.build()


@program()
def monitor_of_momentum(run: Run) -> None:
    """`LearningRateMonitor(log_momentum=True)` without a scheduler."""
    run.fit(Regression(), callbacks=[LearningRateMonitor("step", log_momentum=True)])


@program()
def copied_in_on_fit_start(run: Run) -> None:
    """`copy.deepcopy(module.net)` in `on_fit_start`, for a comparison in the end."""

    class Copies(_Adam):
        def on_fit_start(self) -> None:
            self.first = [copy.deepcopy(self.net)]

        def on_train_end(self) -> None:
            self.log_dict({})

    module = Copies()
    run.fit(module)
    run.keep(**{name.replace(".", "_"): param for name, param in module.first[0].named_parameters()})


class _Lookahead(torch.optim.Optimizer):
    """Lookahead: slow weights that follow the fast ones every other step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.steps = inner, 0
        super().__init__([param for group in inner.param_groups for param in group["params"]], {})
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("slow", param.detach().clone())
        result = self.inner.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for group in self.param_groups:
                for param in group["params"]:
                    slow = self.state[param]["slow"]
                    slow.lerp_(param, 0.5)
                    param.copy_(slow)
        return result


@program()
class lookahead_around_adamw(Regression):
    """An optimizer around another one: Lookahead."""

    def configure_optimizers(self) -> Any:
        return _Lookahead(torch.optim.AdamW(self.parameters(), 0.01))


_IN_SLICES = {"stage[123]*": Refusal("MisconfigurationException", r"LBFGS.*strategy='zeroplus_stage0'")}


@program(refused=_IN_SLICES, on_three_ranks=True)
class lbfgs(Regression):
    """LBFGS, which calls its closure several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)


@program({"max_epochs": 2}, refused=_IN_SLICES)
class lbfgs_with_schedule(lbfgs):
    """LBFGS with a scheduler, which wraps its `step`."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@program({"gradient_clip_val": 0.5}, refused=_IN_SLICES)
class lbfgs_clipped(lbfgs):
    """LBFGS, with Lightning's clipping of each evaluation."""

    def configure_optimizers(self) -> Any:
        # Clipped gradients of one batch hardly differ. With more evaluations, LBFGS would divide by that.
        return torch.optim.LBFGS(self.parameters(), 0.02, max_iter=2)


@program(refused=_IN_SLICES)
class lbfgs_by_hand(Manual):
    """LBFGS in manual optimization, with a closure of the user's."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        losses = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            losses.append(loss.detach())
            return loss

        optimizer.step(closure)
        self.log("evaluations", float(len(losses)))
        self.log("last", losses[-1], sync_dist=True)


@program(refused={**_IN_SLICES, "fsdp*": Refusal("MisconfigurationException", "LBFGS.*save_weights_only=True")})
def lbfgs_resumes(run: Run) -> None:
    """LBFGS is saved after an epoch, and goes on."""
    trainer = run.fit(lbfgs(), max_epochs=1)
    path = run.folder / "lbfgs.ckpt"
    trainer.save_checkpoint(path)
    run.fit(lbfgs(), max_epochs=2, ckpt_path=path)


@program()
class channels_last(Regression):
    """A network in `channels_last`, whose convolutions' weights are not contiguous."""

    def build(self) -> nn.Module:
        layers = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Flatten(), nn.Linear(4, 4))
        return layers.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.pad(x, (0, 24)).view(-1, 2, 4, 4))


@program()
class transposed_weight(Regression):
    """A parameter that is the transpose of a contiguous tensor."""

    def build(self) -> nn.Module:
        layer = nn.Linear(8, 4)
        layer.weight = nn.Parameter(torch.randn(8, 4).t())
        return layer


@program(refused={"stage[123]*": SPARSE, "fsdp*": SPARSE})
class sparse_embedding(Regression):
    """`nn.Embedding(sparse=True)`."""

    def build(self) -> nn.Module:
        return nn.Embedding(16, 4, sparse=True)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch[0].abs().mul(4).long().clamp(max=15)).mean(1), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@program(precision="bf16-true", without=("stage[123]*", "fsdp*"))
class low_sparse_embedding(Regression):
    """The same in bf16."""

    def build(self) -> nn.Module:
        return nn.Embedding(16, 4, sparse=True)

    def loss(self, batch: Any) -> Tensor:
        rows = (batch[0] > 0).long() + 2 * torch.arange(8, device=self.device)  # that no rounding changes
        return F.mse_loss(self.net(rows).mean(1), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 10.0)  # large beside the rounding of the weights


@program(
    stays=("*nothing",),
    refused={pattern: Refusal("MisconfigurationException", "Make it a buffer") for pattern in ("stage3*", "fsdp*")},
)
class empty_parameter(Regression):
    """A parameter without elements."""

    def build(self) -> nn.Module:
        layer = nn.Linear(8, 4)
        layer.register_parameter("nothing", nn.Parameter(torch.zeros(0)))
        return layer

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.net.nothing.sum()  # type: ignore[operator, union-attr]


@program()
class steps_by_itself(Regression):
    """`add_param_group` of an optimizer in mid-fit."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.net(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), 0.01)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            optimizer: Any = self.optimizers()
            optimizer.add_param_group({"params": list(self.late.parameters()), "lr": 0.02})
