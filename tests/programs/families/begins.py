"""Ranks that begin with other weights and buffers, and layers that the Trainer synchronizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import LayerSync
from torch import Tensor, nn

from tests.programs.base import Manual, Regression, step
from tests.programs.fabric_base import fabric_program, train, train_on
from tests.programs.program import program
from tests.programs.run import Run


def _differently() -> nn.Module:
    """Each rank draws its own, as without ``seed_everything``."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    net.register_buffer("shift", torch.full((3,), 1.0 + dist.get_rank()))
    with torch.no_grad():
        for param in net.parameters():
            param.add_(0.3 * dist.get_rank())
    return net


@program(on_three_ranks=True)
def begins_differently(run: Run) -> None:
    """Each rank draws its own weights and buffers: all train from those of rank 0, which `on_fit_start` reads."""

    class Differs(Regression):
        def build(self) -> nn.Module:
            return _differently()

        def on_fit_start(self) -> None:
            run.keep(shift=self.net.shift)  # type: ignore[arg-type]

        def on_train_start(self) -> None:
            self.log_shift = float(self.net.shift.sum())  # type: ignore[operator, union-attr]

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + self.log_shift

    class Sized(Differs):
        def configure_optimizers(self) -> Any:
            rate = 0.1 / float(self.net.shift[0])  # type: ignore[index, arg-type]
            return torch.optim.SGD(self.parameters(), rate, momentum=0.9)

    run.fit(Sized())
    run.fit(Sized(), max_epochs=2)


@program()
def begins_differently_by_hand(run: Run) -> None:
    """The same in a manual loop, whose first batch comes after a validation."""

    class Differs(Manual):
        def build(self) -> nn.Module:
            return _differently()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + self.net.shift.sum()  # type: ignore[operator, union-attr]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            step(self.optimizers())

    run.fit(Differs(), val=run.loader(2), num_sanity_val_steps=1, max_epochs=2)


@program(stays=("*",))
def begins_differently_without_an_optimizer(run: Run) -> None:
    """The same with nothing to optimize: the training moves a buffer."""

    class Counts(Manual):
        def build(self) -> nn.Module:
            return _differently()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.net.shift += batch[0].mean()  # type: ignore[operator]

        def configure_optimizers(self) -> None:
            return None

    run.fit(Counts())


@fabric_program()
def fabric_begins_differently(run: Run) -> None:
    """Each rank draws its own weights and buffers, under Fabric."""

    class Differs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _differently()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + self.net.shift.sum()  # type: ignore[operator, union-attr]

    net = Differs()

    def step(fabric: Any, model: Any, optimizer: Any, batch: Any) -> None:
        if "shift" not in run.kept:
            run.keep(shift=net.net.shift)  # type: ignore[arg-type]
        train_on(fabric, model, optimizer, batch)

    train(run, step, net=net)


class _Sum(torch.autograd.Function):
    """The sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


class _Synchronized(nn.BatchNorm1d):
    """The statistics of all ranks. Torch's own layer needs a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        rows = _Sum.apply(x.new_tensor(float(len(x))))
        mean = _Sum.apply(x.sum(0)) / rows
        var = _Sum.apply((x - mean).square().sum(0)) / rows
        with torch.no_grad():
            self.num_batches_tracked += 1  # type: ignore[operator]
            self.running_mean.lerp_(mean, self.momentum)  # type: ignore[union-attr, arg-type]
            self.running_var.lerp_(var, self.momentum)  # type: ignore[union-attr, arg-type]
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


class _Sync(LayerSync):
    """As Lightning's ``TorchSyncBatchNorm``, which `Trainer(sync_batchnorm=True)` chooses."""

    def apply(self, model: nn.Module) -> nn.Module:
        return self._exchange(model, nn.BatchNorm1d, _Synchronized)

    def revert(self, model: nn.Module) -> nn.Module:
        return self._exchange(model, _Synchronized, nn.BatchNorm1d)

    def _exchange(self, model: nn.Module, old: type, new: Any) -> nn.Module:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is old:
                    layer: Any = new(child.num_features)
                    for key, value in (*child.named_parameters(), *child.named_buffers()):
                        setattr(layer, key, value)
                    setattr(parent, name, layer)
        return model


@program(on_three_ranks=True)
def synchronized_layers(run: Run) -> None:
    """`Trainer(plugins=[LayerSync])`, as of `sync_batchnorm=True`: statistics of all ranks; two fits, and a test."""

    class Normalizes(Regression):
        def build(self) -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch), sync_dist=True)

    module = Normalizes()
    trainer = run.fit(module, val=run.loader(2), plugins=[_Sync()])
    run.keep(ordinary=float(type(module.net[1]) is nn.BatchNorm1d))  # type: ignore[index]
    trainer.test(module, run.loader(2), verbose=False)
    run.fit(module, val=run.loader(2), plugins=[_Sync()], max_epochs=2)
