"""What the Trainer, torch and users do around an ordinary module: flags, hooks, loaders, layers."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import DeviceStatsMonitor, ModelSummary
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from tests.programs.base import Manual, Regression, TwoParts, step, trains
from tests.programs.program import program
from tests.programs.run import Run

_trains = partial(trains, __name__)


@program(trainer={"detect_anomaly": True})
class detects_anomalies(Regression):
    """`Trainer(detect_anomaly=True)`."""


@program(trainer={"overfit_batches": 2, "max_epochs": 2})
class overfits_two_batches(Regression):
    """`Trainer(overfit_batches=2)`."""


@program(trainer={"profiler": "simple", "max_time": {"hours": 1}})
class is_profiled(Regression):
    """A profiler and a time limit."""


@program()
def summary_with_an_example(run: Run) -> None:
    """`example_input_array`: the summary runs the module once, before the fit."""

    class WithExample(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.ones(2, 8)

    run.fit(WithExample(), callbacks=[ModelSummary(max_depth=2)], enable_model_summary=True)


@program()
def device_statistics(run: Run) -> None:
    """`DeviceStatsMonitor`, with a logger."""
    run.fit(Regression(), callbacks=[DeviceStatsMonitor(cpu_stats=False)])


@program()
class activations_on_the_host(Regression):
    """`torch.autograd.graph.save_on_cpu()` around the forward."""

    def loss(self, batch: Any) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().loss(batch)


@program()
class packed_activations(Regression):
    """`saved_tensors_hooks` that keep all that a graph saves as copies."""

    def loss(self, batch: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda kept: kept):
            return super().loss(batch)


@program()
class checkpointed_in_segments(Regression):
    """`checkpoint_sequential` over a network of six layers."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.net, 3, x, use_reentrant=False)


@program()
class steps_its_scheduler(Regression):
    """`lr_scheduler_step` of the user's own."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7), "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.global_step % 2:
            scheduler.step()


@program()
def two_loaders(run: Run) -> None:
    """A dictionary of loaders, with a `CombinedLoader` for validation."""

    class Both(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch["a"]) + 0.5 * self.loss(batch["b"])

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", self.loss(batch), sync_dist=True)

    validation = CombinedLoader([run.loader(2), run.loader(2)], "sequential")
    run.fit(Both(), {"a": run.loader(3), "b": run.loader(3)}, validation)


@program()
class batch_of_ones_own(Regression):
    """`transfer_batch_to_device` and `on_after_batch_transfer` change the batch."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return [part.to(device) * 0.5 for part in batch]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.1, batch[1]]


@program()
class compiled_part(Regression):
    """`torch.compile` of the network within the module, by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.quick = torch.compile(self.net, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.quick(x)


@program()
class compiled_network(Regression):
    """`self.net = torch.compile(net)`: the names of parameters have a prefix."""

    def build(self) -> nn.Module:
        return torch.compile(super().build(), backend="eager")  # type: ignore[return-value]


@program()
class compiled_layers(Regression):
    """`torch.compile` of each layer, one of which has parameters of its own."""

    def build(self) -> nn.Module:
        layers = (nn.Linear(8, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 6)), nn.Linear(6, 4))
        return nn.Sequential(*(torch.compile(layer, backend="eager") for layer in layers))  # type: ignore[arg-type]

    def on_train_epoch_end(self) -> None:
        state = {name: 0.9 * value for name, value in self.state_dict().items()}
        assert "net.0._orig_mod.weight" in state
        self.load_state_dict(state)


class _Network(nn.Module):
    """Of one's own: Dynamo leaves frames of torch's modules alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@program()
class compiled_in_place(Regression):
    """`self.net.compile()` of a network of one's own, which is compiled indeed."""

    def build(self) -> nn.Module:
        return _Network()

    def __init__(self) -> None:
        super().__init__()
        self.graphs = 0
        torch._dynamo.reset()  # which keeps 8 graphs of a frame in a process, and other cells have compiled this one
        self.net.compile(backend=self._count)

    def _count(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph

    def on_train_end(self) -> None:
        assert self.graphs > 0


@program()
def compiled_ahead_of_time(run: Run) -> None:
    """The same with AOTAutograd, which inductor is built on, and a validation."""

    class Compiled(Regression):
        def build(self) -> nn.Module:
            return _Network()

        def __init__(self) -> None:
            super().__init__()
            torch._dynamo.reset()
            self.net.compile(backend="aot_eager")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validated", self.loss(batch), sync_dist=True)

    run.fit(Compiled(), val=run.loader(2), num_sanity_val_steps=1, max_epochs=2)


@program()
class skipped_initialization(Regression):
    """`torch.nn.utils.skip_init`, and values by `apply` in `on_fit_start`."""

    def build(self) -> nn.Module:
        net = nn.Sequential(nn.utils.skip_init(nn.Linear, 8, 6), nn.Tanh(), nn.utils.skip_init(nn.Linear, 6, 4))
        for param in net.parameters():
            nn.init.zeros_(param)  # what nobody has written may be NaN, and with it the difference of the weights
        return net

    def on_fit_start(self) -> None:
        self.net.apply(_fill)


def _fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        torch.manual_seed(3)
        nn.init.orthogonal_(module.weight)
        nn.init.zeros_(module.bias)


@program()
class initialized_again(Regression):
    """`self.apply` in the second epoch: the layers begin anew, in the middle of the fit."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.apply(_fill)


@program()
class pickled_while_it_trains(Regression):
    """`pickle.dumps` of the network after each batch; what is loaded from it is used."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.log("copy", F.mse_loss(pickle.loads(pickle.dumps(self.net))(batch[0]), batch[1]), sync_dist=True)


@program()
class hooks_of_state_dict(Regression):
    """Hooks of `state_dict` and `load_state_dict` rename an entry; the module is saved and loaded in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_rename)
        self.register_load_state_dict_pre_hook(_rename_back)

    def on_train_epoch_end(self) -> None:
        state = {name: 0.9 * value for name, value in self.state_dict().items()}
        assert "renamed" in state
        self.load_state_dict(state)


def _rename(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    state[f"{prefix}renamed"] = state.pop(f"{prefix}net.0.weight")


def _rename_back(module: nn.Module, state: Any, prefix: str, *unused: Any) -> None:
    if f"{prefix}renamed" in state:
        state[f"{prefix}net.0.weight"] = state.pop(f"{prefix}renamed")


@program()
class hooks_of_all_modules(Regression):
    """A forward hook and a backward hook of all modules, for the time of the fit."""

    def on_fit_start(self) -> None:
        self.seen = 0
        self.handles = [
            nn.modules.module.register_module_forward_hook(self._count),
            nn.modules.module.register_module_full_backward_hook(self._count),
        ]

    def _count(self, module: nn.Module, *unused: Any) -> None:
        self.seen += isinstance(module, nn.Linear)

    def on_train_batch_end(self, *unused: Any) -> None:
        self.log("seen", float(self.seen))

    def on_fit_end(self) -> None:
        for handle in self.handles:
            handle.remove()


_trains("bilinear", "`nn.Bilinear`, of an input with itself.", lambda: _Twice(nn.Bilinear(8, 8, 4)))


class _Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


@program(reference="ddp_find_unused_parameters_true")
class adaptive_softmax(Regression):
    """`nn.AdaptiveLogSoftmaxWithLoss`, whose clusters some batches do not reach."""

    def build(self) -> nn.Module:
        return nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10], div_value=2)

    def loss(self, batch: Any) -> Tensor:
        return self.net(batch[0], (batch[1].sum(1).abs() * 4).long().clamp(max=19)).loss


@program()
class connectionist(Regression):
    """`CTCLoss` over a recurrent network."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"lstm": nn.LSTM(2, 6, bidirectional=True), "head": nn.Linear(12, 5)})

    def loss(self, batch: Any) -> Tensor:
        steps = batch[0].view(-1, 4, 2).transpose(0, 1)
        scores = self.net["head"](self.net["lstm"](steps)[0]).log_softmax(-1)  # type: ignore[index]
        rows = steps.shape[1]
        targets = 1 + (batch[1][:, :2].abs() * 2).long().clamp(max=3)
        return F.ctc_loss(scores, targets, torch.full((rows,), 4), torch.full((rows,), 2), zero_infinity=True)


@program()
class scaled_by_hand(Manual):
    """The loss is scaled, and the gradients are divided by the scale before the step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch) * 1024)
        for param in self.parameters():
            if param.grad is not None:
                param.grad.div_(1024)
        self.log("finite", float(all(param.grad.isfinite().all() for param in self.parameters())))
        step(self.optimizers())


@program()
class flat_gradient(Manual):
    """All gradients are read as one vector, normalized, and put back."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        flat = nn.utils.parameters_to_vector([param.grad for param in self.parameters()])
        flat = flat / (flat.norm() + 1)
        start = 0
        for param in self.parameters():
            param.grad = flat[start : start + param.numel()].view(param.shape).clone()
            start += param.numel()
        step(self.optimizers())


@program()
class reduced_by_the_user(Manual):
    """The user averages each gradient over the ranks once more, as a loop without DDP does."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for param in self.parameters():
            param.grad = self.trainer.strategy.reduce(param.grad, reduce_op="mean")
        step(self.optimizers())


@program()
class weights_are_broadcast(Regression):
    """Rank 0 draws noise for the weights, which is broadcast; `broadcast` of the weights themselves."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        generator = torch.Generator().manual_seed(7 + self.global_rank)
        for param in self.parameters():
            value = param.detach() + 0.1 * torch.randn(param.shape, generator=generator).to(self.device)
            dist.broadcast(value, 0)
            param.data = value.clone()
            dist.broadcast(param, 0)
        state = self.trainer.strategy.broadcast(dict(self.named_parameters()))
        self.log("size", sum(value.double().square().sum() for value in state.values()))


@program()
class weights_are_summed(Regression):
    """`all_reduce` of the weights themselves, before the first and after the second batch: they are doubled."""

    def on_train_start(self) -> None:
        for param in self.parameters():
            dist.all_reduce(param)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.on_train_start()


@program()
class weights_are_averaged_by_hand(Regression):
    """`all_reduce` of all weights after each batch, in place, and halved: as local SGD does."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for param in self.parameters():
            dist.all_reduce(param.data)
            param.data.div_(2 * self.trainer.world_size)


class _Summing(nn.Linear):
    """A layer that sums its weight over the ranks when it runs for the first time."""

    summed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.summed:
            self.summed = True
            with torch.no_grad():
                dist.all_reduce(self.weight)
        return super().forward(x)


@program()
class weights_are_summed_in_forward(Regression):
    """`all_reduce` of a layer's weight in its own forward()."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), _Summing(8, 4))


@program()
class gradients_are_reduced_in_place(Manual):
    """`torch.distributed.all_reduce(param.grad)`, also with `async_op=True`, and a division, before the step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for index, param in enumerate(self.parameters()):
            work = dist.all_reduce(param.grad, async_op=index % 2 == 0)
            if work is not None:
                work.wait()
            param.grad.div_(self.trainer.world_size)  # type: ignore[union-attr]
        step(self.optimizers())


@program()
class largest_gradient(Regression):
    """`on_after_backward` logs the largest gradient and where it is."""

    def on_after_backward(self) -> None:
        largest = {name: param.grad.abs().max() for name, param in self.named_parameters()}  # type: ignore[union-attr]
        self.log("largest", max(largest.values()))
        self.log("where", float(list(largest).index(max(largest, key=lambda name: float(largest[name])))))


@program()
class quantization_aware(Regression):
    """Fake quantization of weights and activations, with observers."""

    def build(self) -> nn.Module:
        from torch.ao import quantization

        net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
        net.train()
        net.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        return quantization.prepare_qat(net)


@program()
class second_trainer_within(Regression):
    """A copy of the network is trained by hand in `on_train_epoch_end`, with an optimizer of its own."""

    def on_train_epoch_end(self) -> None:
        twin = pickle.loads(pickle.dumps(self.net))
        optimizer = torch.optim.SGD(twin.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            twin(torch.ones(2, 8, device=self.device)).square().mean().backward()
            optimizer.step()
        self.log("twin", twin(torch.ones(2, 8, device=self.device)).square().mean())


class _Layer(ABC, nn.Module):
    """An abstract layer, whose first base has no attributes of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""


class _Tanh(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class _Signs(ABC, torch.optim.Optimizer):
    """An abstract optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @abstractmethod
    def way(self, grad: Tensor) -> Tensor:
        """Where to go."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self.way(param.grad), alpha=-group["lr"])
        return loss


class _Sign(_Signs):
    def way(self, grad: Tensor) -> Tensor:
        return grad.sign()


class _Task(ABC, pl.LightningModule):
    @abstractmethod
    def build(self) -> nn.Module:
        """Make the network."""


class _Watches(ABC, pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        pl_module.log("weights", sum(param.detach().square().sum() for param in pl_module.parameters()))


@program()
def abstract_classes(run: Run) -> None:
    """Modules, layers, an optimizer and a callback whose first base is `abc.ABC`."""

    class Whole(_Task, Regression):
        def build(self) -> nn.Module:
            return nn.Sequential(_Tanh(8, 16), _Tanh(16, 4))

        def configure_optimizers(self) -> Any:
            return _Sign(self.parameters(), 0.01)

    run.fit(Whole(), callbacks=[_Watches()], max_epochs=2)


@program(reference="ddp_find_unused_parameters_true")
def abstract_classes_by_hand(run: Run) -> None:
    """The same in manual optimization, with two optimizers and clipping."""

    class Two(_Task, TwoParts):
        def build(self) -> nn.Module:
            return nn.ModuleDict({"a": _Tanh(8, 4), "b": _Tanh(8, 4)})

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for name, optimizer in zip("ab", self.optimizers(), strict=True):
                self.toggle_optimizer(optimizer)
                self.manual_backward(self.use(name, batch))
                self.clip_gradients(optimizer, 0.1, "norm")
                step(optimizer)
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [_Sign(self.net[name].parameters(), 0.01) for name in "ab"]  # type: ignore[index]

    run.fit(Two(), callbacks=[_Watches()], max_epochs=2)
