"""What loggers, metrics and modules with more than weights do: they look at modules, and keep states of their own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.fabric.utilities.throughput import measure_flops
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.programs.base import Regression
from tests.programs.program import program
from tests.programs.run import AllMetrics, Run

# -- modules that are looked at ---------------------------------------------------------------------------------------


@program(on_three_ranks=True)
class printed_by_one_rank(Regression):
    """Rank 0 formats each layer in forward hooks, as `wandb.watch` does: this asks for `layer.bias`."""

    def on_fit_start(self) -> None:
        if self.global_rank == 0:
            for layer in self.net:  # type: ignore[union-attr]
                layer.register_forward_pre_hook(lambda module, args: str(module) and None)
                layer.register_forward_hook(lambda module, args, out: str(module) and None)


@program(on_three_ranks=True)
class attribute_read_by_one_rank(Regression):
    """Ranks ask for weights of layers, `layer.weight`, before and after the forward of these: each for another."""

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.net[0], self.net[2]  # type: ignore[index]
        has_bias = self.global_rank == 0 and last.bias is not None  # type: ignore[union-attr]
        out = self.net(x)
        shape = first.weight.shape if self.global_rank else ()  # type: ignore[union-attr]
        assert has_bias is not bool(shape)
        return out


@program(on_three_ranks=True)
class attribute_used_by_one_rank(Regression):
    """Rank 0 alone uses a layer's weight in its loss, besides the layer."""

    def forward(self, x: Tensor) -> Tensor:
        last: Any = self.net[2]  # type: ignore[index]
        return self.net(x) + (last.weight.sum() if self.global_rank == 0 else 0)


@program()
class weights_logged_in_a_forward(Regression):
    """Rank 0 logs norms of all weights in a forward hook of a layer, and of gradients in hooks of the parameters."""

    def on_fit_start(self) -> None:
        self.norms: list[Tensor] = []
        if self.global_rank == 0:
            self.net[1].register_forward_hook(self.look)  # type: ignore[index]
            for param in self.parameters():
                param.register_hook(lambda grad: self.norms.append(grad.data.norm()))

    def look(self, module: nn.Module, args: Any, out: Any) -> None:
        self.norms += [param.data.cpu().norm() for param in self.parameters()]

    def on_train_epoch_end(self) -> None:
        self.log("norms", sum(self.norms, torch.zeros(())).item())


class _Graphs(AllMetrics):
    """As Lightning's TensorBoardLogger with `log_graph=True`."""

    times = 0

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Tensor | None = None) -> None:
        inputs = model.example_input_array.to(model.device)
        if torch.jit.trace(model, inputs)(inputs).equal(model(inputs)):
            self.times += 1


class _Shows(Regression):
    example_input_array = torch.ones(2, 8)


@program()
def graph_logged(run: Run) -> None:
    """A logger with `log_graph=True` traces the module on rank 0, as the fit begins, and in a second fit."""
    module, logger = _Shows(), _Graphs()
    run.fit(module, logger=logger)
    run.fit(module, logger=logger)
    run.keep(traced=logger.times)


@program()
def flops_measured(run: Run) -> None:
    """Operations are counted, as for `ThroughputMonitor`: of a network on the meta device, and of the module itself."""

    class Measures(Regression):
        def on_fit_start(self) -> None:
            with torch.device("meta"):
                net = self.build()
                self.flops_per_batch = measure_flops(net, lambda: net(torch.ones(4, 8)), lambda out: out.sum())

        def on_train_start(self) -> None:
            inputs = torch.ones(4, 8, device=self.device)
            run.keep(meta=self.flops_per_batch, own=measure_flops(self, lambda: self(inputs)))

    run.fit(Measures())


# -- metrics ----------------------------------------------------------------------------------------------------------


class _Metrics(Regression):
    """Metrics that are saved, with states that are numbers, and lists."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.mean = torchmetrics.CatMetric(), torchmetrics.MeanMetric()
        self.errors = torchmetrics.MetricCollection({"squared": torchmetrics.MeanSquaredError()})
        for metric in (self.seen, self.mean, *self.errors.values()):
            metric.persistent(True)

    def loss(self, batch: Any) -> Tensor:
        out = self(batch[0])
        self.seen.update(out.detach().flatten())
        self.log_dict(self.errors, on_step=False, on_epoch=True)
        self.errors(out, batch[1])
        loss = (out - batch[1]).square().mean()
        self.mean.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log_dict({"seen": self.seen.compute().sum(), "mean": self.mean.compute()})


@program({"max_epochs": 2})
class metrics_with_lists(_Metrics):
    """`CatMetric`, `MeanMetric`, and a `MetricCollection` that Lightning computes and resets."""


class _Judge(torchmetrics.Metric):
    """A metric with a network, as the Fréchet inception distance has."""

    full_state_update = False
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.add_state("total", torch.zeros(3), dist_reduce_fx="sum")

    def update(self, out: Tensor) -> None:
        self.total = self.total + self.net(out).detach().sum(0)

    def compute(self) -> Tensor:
        return self.total.norm()


@program({"max_epochs": 2}, on_three_ranks=True)
class metric_with_a_network(Regression):
    """A metric has a frozen network, as the Fréchet inception distance has; its hash changes with its states."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = _Judge().requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        out = self(batch[0])
        self.judge.update(out)
        self.log("judged", self.judge, on_step=False, on_epoch=True)
        return (out - batch[1]).square().mean()


@program({"max_epochs": 2})
class metric_that_is_trained(Regression):
    """A metric has a layer that is trained, as a loss in the shape of a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = _Judge()

    def loss(self, batch: Any) -> Tensor:
        out = self(batch[0])
        self.judge.update(out)
        return (out - batch[1]).square().mean() + self.judge.net(out).square().mean()


@program({"max_epochs": 2})
class metric_tracked(Regression):
    """A `MetricTracker` copies its metric in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = torchmetrics.MetricTracker(torchmetrics.MeanSquaredError(), maximize=False)

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def loss(self, batch: Any) -> Tensor:
        out = self(batch[0])
        self.tracker.update(out.detach(), batch[1])
        return (out - batch[1]).square().mean()

    def on_train_epoch_end(self) -> None:
        self.log("tracked", self.tracker.compute())


# -- what a `state_dict()` has besides parameters and buffers ---------------------------------------------------------


class _Remembers(nn.Module):
    """A layer with an extra state: a dict with lists and tensors, whose keys grow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.sizes: list[float] = []
        self.means: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(float(len(x) + len(self.sizes)))
        self.means[f"batch{len(self.sizes)}"] = x.detach().mean(0)
        return self.layer(x)

    def get_extra_state(self) -> Any:
        return {"sizes": self.sizes, "means": self.means, "name": "remembers"}

    def set_extra_state(self, state: Any) -> None:
        self.sizes, self.means = list(state["sizes"]), dict(state["means"])


class _RemembersATensor(_Remembers):
    """The extra state is a tensor, whose shape changes."""

    def get_extra_state(self) -> Any:
        return torch.tensor(self.sizes)

    def set_extra_state(self, state: Any) -> None:
        self.sizes = state.tolist()


class _Extra(Regression):
    def build(self) -> nn.Module:
        return _Remembers()


class _ExtraTensor(Regression):
    def build(self) -> nn.Module:
        return _RemembersATensor()


def _resumed(run: Run, make: Any) -> Any:
    """Fit, save, go on in another module, save, and load the checkpoint into a third one."""
    run.fit(make()).save_checkpoint(run.folder / "first.ckpt")
    run.fit(make(), ckpt_path=run.folder / "first.ckpt", max_epochs=2).save_checkpoint(run.folder / "second.ckpt")
    module = make()
    run.compare(module)
    run.trainer().validate(module, run.loader(2), ckpt_path=run.folder / "second.ckpt", verbose=False)
    return module


def _one_file(run: Run, make: Any, **what: bool) -> Path:
    """Fit, save, and write one file of it for each rank, as it is under DDP."""
    path = run.folder / "first.ckpt"
    run.fit(make()).save_checkpoint(path)
    if not path.is_dir():
        return path
    zp.export(path, run.folder / f"whole{run.rank}.ckpt", **what)
    return run.folder / f"whole{run.rank}.ckpt"


def _exported(run: Run, make: Any) -> Any:
    """Load that file in plain torch."""
    module = make()
    module.load_state_dict(torch.load(_one_file(run, make), weights_only=True)["state_dict"])
    run.compare(module)
    return module


def _keep_metrics(run: Run, module: Any) -> None:
    run.keep(seen=torch.cat([each.flatten() for each in module.seen.value]), mean=module.mean.mean_value)


def _keep_memories(run: Run, module: Any) -> None:
    run.keep(sizes=torch.tensor(module.net.sizes), **module.net.means)


@program()
def metrics_resumed(run: Run) -> None:
    """Metrics with `persistent(True)`, one of which has a list, are saved and resumed."""
    _keep_metrics(run, _resumed(run, _Metrics))


@program()
def metrics_exported(run: Run) -> None:
    """The same metrics are in the file of `zp.export(..., "model.ckpt")`."""
    _keep_metrics(run, _exported(run, _Metrics))


@program()
def extra_state_resumed(run: Run) -> None:
    """`get_extra_state()` of a module gives a dict with lists and tensors; it is saved and resumed."""
    _keep_memories(run, _resumed(run, _Extra))


@program()
def extra_state_exported(run: Run) -> None:
    """The extra state is in the file of `zp.export(..., "model.ckpt")`."""
    _keep_memories(run, _exported(run, _Extra))


@program()
def extra_tensor_resumed(run: Run) -> None:
    """`get_extra_state()` gives a tensor, whose shape is another one in the next fit."""
    _keep_memories(run, _resumed(run, _ExtraTensor))


@program()
def extra_tensor_exported(run: Run) -> None:
    """The same in the file of `zp.export(..., "model.ckpt")`."""
    _keep_memories(run, _exported(run, _ExtraTensor))


@program()
def extra_tensor_from_one_file(run: Run) -> None:
    """A fit goes on from that file."""
    module = _ExtraTensor()
    run.fit(module, ckpt_path=_one_file(run, _ExtraTensor, optimizer=True), max_epochs=2)
    _keep_memories(run, module)


@program()
def extra_state_averaged(run: Run) -> None:
    """A module with an extra state, and `WeightAveraging`, are saved and resumed."""
    run.fit(_Extra(), callbacks=[EMAWeightAveraging(decay=0.5)]).save_checkpoint(run.folder / "first.ckpt")
    module = _Extra()
    averages = EMAWeightAveraging(decay=0.5)
    run.fit(module, ckpt_path=run.folder / "first.ckpt", max_epochs=2, callbacks=[averages])
    _keep_memories(run, module)


class _Data(pl.LightningDataModule):
    """Doubles its inputs, and counts batches in its state."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.seen = run, 0

    def train_dataloader(self) -> Any:
        return self.run.loader()

    val_dataloader = train_dataloader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen += 1
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [2 * batch[0], batch[1]]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "counted": torch.full((2,), float(self.seen))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen, self.counted = state_dict["seen"], state_dict["counted"]


@program()
def data_module_with_a_state(run: Run) -> None:
    """A data module changes batches, and has a state, which is saved and resumed."""
    trainer = run.trainer()
    trainer.fit(Regression(), datamodule=_Data(run))
    trainer.save_checkpoint(run.folder / "first.ckpt")
    module, data = Regression(), _Data(run)
    trainer = run.trainer(max_epochs=2)
    run.compare(module)
    trainer.fit(module, datamodule=data, ckpt_path=run.folder / "first.ckpt")
    (found,) = trainer.validate(copy.deepcopy(module), datamodule=data, verbose=False)
    run.keep(seen=data.seen, counted=data.counted, **found)
