"""Tools of torch itself that take a module, its weights or its gradients: vectors, ensembles, traces, second orders."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, rnn, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.programs.base import Manual, Regression, step
from tests.programs.program import Refusal, program
from tests.programs.run import Run


class _Adam(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


@program(on_three_ranks=True)
class pseudo_labels(Regression):
    """The network's own outputs under `torch.inference_mode()` are part of the targets."""

    def loss(self, batch: Any) -> Tensor:
        with torch.inference_mode():
            wanted = self(1.1 * batch[0])
        return super().loss(batch) + 0.1 * F.mse_loss(self(batch[0]), wanted.clone())


@program()
def weights_as_a_vector(run: Run) -> None:
    """`parameters_to_vector` after each step, for a norm; `vector_to_parameters` after each epoch."""

    class Vector(_Adam):
        def on_train_batch_end(self, *args: Any) -> None:
            self.log("norm", parameters_to_vector(self.net.parameters()).norm(), sync_dist=True)

        def on_train_epoch_end(self) -> None:
            vector_to_parameters(0.9 * parameters_to_vector(self.net.parameters()).detach(), self.net.parameters())

    run.fit(Vector(), max_epochs=2)


@program()
class gradients_as_a_vector(Manual):
    """`parameters_to_vector` of the gradients before the step, whose parts are scaled by the whole."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        norm = parameters_to_vector([param.grad for param in self.parameters()]).norm()
        for param in self.parameters():
            param.grad.div_(1 + norm)  # type: ignore[union-attr]
        step(self.optimizers())


@program()
def ensemble(run: Run) -> None:
    """`stack_module_state` and `vmap` of two networks in validation."""

    class Ensemble(_Adam):
        def build(self) -> nn.Module:
            return nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))

        def forward(self, x: Tensor) -> Any:
            nets: Any = self.net
            if self.training:
                return (nets[0](x) + nets[1](x)) / 2
            params, buffers = torch.func.stack_module_state(list(nets))
            base = copy.deepcopy(nets[0]).to("meta")

            def call(params: Any, buffers: Any, x: Tensor) -> Tensor:
                return torch.func.functional_call(base, (params, buffers), (x,))

            return torch.func.vmap(call, in_dims=(0, 0, None))(params, buffers, x).mean(0)

    run.fit(Ensemble(), run.loader(4), val=run.loader(2), max_epochs=2)


@program()
def saved_by_torch(run: Run) -> None:
    """`torch.save(net.state_dict())` after each epoch on every rank, and `torch.load` into a copy."""

    class Saves(_Adam):
        def on_train_epoch_end(self) -> None:
            file = io.BytesIO()
            torch.save(self.net.state_dict(), file)
            file.seek(0)
            copied = self.build().to(self.device)
            copied.load_state_dict(torch.load(file))
            self.log("copied", copied(torch.ones(1, 8, device=self.device)).sum(), sync_dist=True)

    run.fit(Saves(), max_epochs=2)


class _Traces(_Adam):
    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            torch.jit.trace(self.net, torch.ones(2, 8, device=self.device))


@program(refused={name: Refusal("PartitionedWeightError", r"copy\.deepcopy") for name in ("stage3*", "fsdp*")})
def traced(run: Run) -> None:
    """`torch.jit.trace` of the network at the end of each epoch."""
    run.fit(_Traces(), max_epochs=2)


@program(refused=dict.fromkeys(("stage3*", "fsdp*"), Refusal("PartitionedWeightError", r"copy\.deepcopy")))
class traced_as_a_whole(_Adam):
    """`torch.jit.trace` of the LightningModule itself at the end of each epoch."""

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            frozen = torch.jit.trace(self, torch.ones(2, 8, device=self.device))
            self.log("traced", frozen(torch.ones(1, 8, device=self.device)).sum(), sync_dist=True)


@program()
def traced_copy(run: Run) -> None:
    """`torch.jit.trace` of a copy of the network."""

    class Traces(_Adam):
        def on_train_epoch_end(self) -> None:
            with torch.no_grad():
                frozen = torch.jit.trace(copy.deepcopy(self.net), torch.ones(2, 8, device=self.device))
                self.log("traced", frozen(torch.ones(1, 8, device=self.device)).sum(), sync_dist=True)

    run.fit(Traces(), max_epochs=2)


@program()
class functional_jacobian(Regression):
    """`torch.autograd.functional`: a Jacobian and a product with a Hessian, both differentiable, in the loss."""

    def loss(self, batch: Any) -> Tensor:
        def total(x: Tensor) -> Tensor:
            return self.net(x).square().sum()

        slopes: Any = torch.autograd.functional.jacobian(self.net, batch[0][:2], create_graph=True)
        curve: Any = torch.autograd.functional.hvp(total, batch[0], torch.ones_like(batch[0]), create_graph=True)[1]
        return super().loss(batch) + 0.1 * slopes.square().mean() + 0.01 * curve.square().mean()


@program(stays=("average.*",))
def averaged_by_hand(run: Run) -> None:
    """`AveragedModel` over the steps, validated; `update_bn` in the end."""

    class Averages(_Adam):
        def build(self) -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))

        def on_fit_start(self) -> None:
            self.means = [AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))]

        def on_train_batch_end(self, *args: Any) -> None:
            self.means[0].update_parameters(self.net)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("of_mean", F.mse_loss(self.means[0].eval()(batch[0]), batch[1]), sync_dist=True)

        def on_train_end(self) -> None:
            update_bn([torch.ones(4, 8, device=self.device) * scale for scale in (1.0, 2.0)], self.means[0])

    module = Averages()
    run.fit(module, run.loader(4), val=run.loader(2), max_epochs=2)
    run.keep(mean=float(sum(param.double().sum() for param in module.means[0].parameters())))


@program()
class packed_sequences(Regression):
    """An LSTM over packed sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)

    def build(self) -> nn.Module:
        return nn.LSTM(2, 6, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + torch.arange(len(x)) % 4  # torch wants them on the CPU
        packed = rnn.pack_padded_sequence(x.view(-1, 4, 2), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.net(packed)[1][0][-1])


@program()
class lazy_layers(Regression):
    """`nn.LazyLinear`, whose weights a first forward in `configure_model` makes."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(12), nn.Tanh(), nn.LazyLinear(4))

    def configure_model(self) -> None:
        if nn.parameter.is_lazy(self.net[0].weight):  # type: ignore[index]
            torch.manual_seed(1)
            self.net(torch.ones(1, 8, device=self.device))


@program(bound=0.04)
class autocast_in_forward(Regression):
    """`torch.autocast` in `forward`; the weights are fp32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.net(x).float()


@program(reference="ddp_find_unused_parameters_true")
class detached_by_functional_call(Manual):
    """A generator's loss through a discriminator whose weights `functional_call` detaches."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 4)})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        net: Any = self.net
        detached = {name: param.detach() for name, param in net["b"].named_parameters()}
        fake = net["a"](batch[0])
        self.manual_backward(torch.func.functional_call(net["b"], detached, (fake,)).square().mean())
        self.manual_backward(F.mse_loss(net["b"](fake.detach()), batch[1]))
        step(self.optimizers())
