"""What is changed while a fit runs: where and of which dtype weights are, their optimizers, how they are computed."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.programs.base import Manual, Regression
from tests.programs.own_optimizers import LAMB
from tests.programs.program import Refusal, program
from tests.programs.run import Run

# At stage 0 torch's own `add_param_group` takes it, and its gradients are not averaged, as under DDP.
_NEW_PARAMETER = Refusal("ValueError", "when the fit began.*before the fit")


class _Encoder(Regression):
    def build(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        return nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 2), "head": nn.Linear(8, 4)})

    def forward(self, x: Tensor) -> Tensor:
        return self.net["head"](self.net["encoder"](x.view(-1, 2, 4)).flatten(1))


@program()
def fast_path_in_validation(run: Run) -> None:
    """Validation of a TransformerEncoder, whose fast path uses the weights of all its parts itself."""
    run.fit(_Encoder(), run.loader(4), run.loader(2), val_check_interval=2)


class _WeightDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 4, batch_first=True)
        raw = self.lstm.weight_hh_l0
        del self.lstm._parameters["weight_hh_l0"]
        self.lstm.register_parameter("weight_hh_l0_raw", nn.Parameter(raw.data))

    def forward(self, x: Tensor) -> Tensor:
        raw = self.lstm.weight_hh_l0_raw
        mask = torch.ones_like(raw)
        mask[::3] = 0
        self.lstm.weight_hh_l0 = raw * mask  # type: ignore[assignment]
        return self.lstm(x)[0]


@program()
class weight_drop(Regression):
    """AWD-LSTM: the recurrent weight is computed from a raw one before each forward, and set as an attribute."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"lstm": _WeightDrop(), "head": nn.Linear(16, 4)})

    def forward(self, x: Tensor) -> Tensor:
        return self.net["head"](self.net["lstm"](x.view(-1, 4, 2)).flatten(1))


@program()
class foreach_functions(Regression):
    """`torch._foreach_*` of gradients, weights and an average."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = copy.deepcopy(self.net).requires_grad_(False)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [param.grad for param in self.net.parameters()]
        norms = torch._foreach_norm(grads)
        torch._foreach_mul_(grads, [1 / (1 + float(norm)) for norm in norms])

    @torch.no_grad()
    def on_train_batch_end(self, *unused: Any) -> None:
        params = list(self.net.parameters())
        torch._foreach_mul_(params, 0.99)
        torch._foreach_lerp_(list(self.mean.parameters()), params, 0.3)
        self.log("norm", torch.stack(torch._foreach_norm(params)).norm())


class _ForeachCopies(Regression):
    def average(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.net.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        params = list(self.net.parameters())
        if batch_idx % 2:
            torch._foreach_lerp_(params, self.mean, 0.5)
            torch._foreach_copy_(self.mean, params)
        else:
            torch._foreach_copy_(params, self.mean)
        signs = torch._foreach_sign(params)
        torch._foreach_add_(params, signs, alpha=1e-3)
        self.log("signs", torch.stack([sign.sum() for sign in signs]).sum())


@program()
class foreach_copies(_ForeachCopies):
    """`torch._foreach_copy_` between the weights and an average, both ways in the middle of a fit."""

    def on_fit_start(self) -> None:
        self.mean = self.average()


@program()
class foreach_copies_from_before(_ForeachCopies):
    """The same, and the average is made in `__init__`."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = self.average()


@program()
def resumed_after_an_exception(run: Run) -> None:
    """`OnExceptionCheckpoint`: a hook raises on all ranks, and another fit goes on from the file."""

    class Fails(Regression):
        fails = True

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and self.fails:
                raise KeyError("mine")

    try:
        run.fit(Fails(), callbacks=[OnExceptionCheckpoint(run.folder)], enable_checkpointing=True)
    except KeyError:
        pass
    again = Fails()
    again.fails = False
    run.fit(again, ckpt_path=str(run.folder / "on_exception.ckpt"))


@program(reference="ddp_find_unused_parameters_true")
class gradnorm(Manual):
    """GradNorm: weights of two losses are trained by the norms of their gradients for the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        out = self(batch[0])
        losses = torch.stack([F.mse_loss(out, batch[1]), out.abs().mean()])
        shared = self.net[2].weight
        norms = torch.stack(
            [torch.autograd.grad(self.weights[i] * losses[i], shared, create_graph=True)[0].norm() for i in range(2)]
        )
        optimizer.zero_grad()
        self.manual_backward((self.weights.detach() * losses).sum(), retain_graph=True)
        target = norms.mean().detach()
        (grad,) = torch.autograd.grad((norms - target).abs().sum(), self.weights)
        self.manual_backward((grad.detach() * self.weights).sum())
        optimizer.step()
        with torch.no_grad():
            self.weights.mul_(2 / self.weights.sum())
        self.log("w0", self.weights[0])


@program()
class reptile(Manual):
    """Reptile: a deep copy is trained by hand; the difference is the gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        fast = copy.deepcopy(self.net)
        inner = torch.optim.SGD(fast.parameters(), 0.1)
        for _ in range(2):
            inner.zero_grad()
            F.mse_loss(fast(batch[0]), batch[1]).backward()
            inner.step()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for slow, quick in zip(self.net.parameters(), fast.parameters(), strict=True):
            grad = slow.data - quick.data
            slow.grad = self.trainer.strategy.reduce(grad, reduce_op="mean")
        optimizer.step()


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


@program(refused={"fsdp*": Refusal("RuntimeError", "leave_parametrized=False")})
class parametrization_removed(Regression):
    """`parametrize.remove_parametrizations` in `on_train_end`, which sets the trained weight."""

    def build(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        parametrize.register_parametrization(net[0], "weight", _Symmetric())
        return net

    def on_train_end(self) -> None:
        parametrize.remove_parametrizations(self.net[0], "weight")


@program(trainer={"max_epochs": 2})
class moved_while_it_trains(Regression):
    """`self.to(self.device)`, `.float()` and `.share_memory()` in hooks, where nothing changes by them."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net.to(self.device)
        self.net.float()
        self.net.share_memory()

    def on_train_epoch_start(self) -> None:
        self.to(self.device)


@program(trainer={"max_epochs": 2})
class moved_with_an_lstm(Regression):
    """The same with an LSTM and BatchNorm, and a copy in float64."""

    def build(self) -> nn.Module:
        net = nn.ModuleDict(
            {"lstm": nn.LSTM(2, 4, batch_first=True), "norm": nn.BatchNorm1d(16), "head": nn.Linear(16, 4)}
        )
        return net

    def forward(self, x: Tensor) -> Tensor:
        return self.net["head"](self.net["norm"](self.net["lstm"](x.view(-1, 4, 2))[0].flatten(1)))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net["lstm"].to(self.device)
        self.float()
        self.net.share_memory()

    def on_train_epoch_end(self) -> None:
        twin = copy.deepcopy(self.net).double()
        x = torch.ones(2, 4, 2, device=self.device).double()
        self.log("twin", twin["lstm"](x)[0].sum().float())
        self.net.to(self.device)


_KEEPS_ITS_DTYPE = Refusal("PartitionedWeightError", "convert the module before")


@program(reference="single", refused={"stage3*": _KEEPS_ITS_DTYPE})
class cast_and_cast_back(Regression):
    """`.double()` and `.float()` in `on_train_start`: torch drops the hooks by which DDP reduces, silently."""

    def on_train_start(self) -> None:
        self.net.double()
        self.net.float()


@program(reference="single", refused={"stage3*": _KEEPS_ITS_DTYPE})
class layer_cast_and_cast_back(Manual):
    """The same of a layer, before and after a backward; attributes of its weight, and what was kept of others, stay."""

    def on_fit_start(self) -> None:
        self.kept = [param.detach() for param in self.net[0].parameters()]  # type: ignore[index, union-attr]
        self.net[2].weight.share = 0.5  # type: ignore[index, union-attr]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        layer: Any = self.net[2]  # type: ignore[index]
        loss = self.loss(batch)
        layer.double()
        layer.float()
        self.manual_backward(loss)
        layer.double()
        self.log("sum", layer.weight.detach().sum().float())
        layer.float()
        layer.weight.grad.mul_(layer.weight.share)
        with torch.no_grad():
            layer.weight.T[0] *= 0.9
        self.manual_backward(self.loss(batch))
        self.log("norm", sum(param.grad.norm() for param in self.parameters()))  # type: ignore[union-attr, misc]
        self.optimizers().step()
        self.optimizers().zero_grad()
        self.log("kept", sum(each.norm() for each in self.kept))


@program(reference="single", refused={"stage3*": _KEEPS_ITS_DTYPE, "fsdp*": _KEEPS_ITS_DTYPE})
def validated_in_float64(run: Run) -> None:
    """`self.double()` for validation, and `self.float()` after it."""

    class Doubles(Regression):
        def on_validation_epoch_start(self) -> None:
            self.double()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", F.mse_loss(self(batch[0].double()), batch[1]).float(), sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            self.float()

    run.fit(Doubles(), run.loader(), run.loader(2), max_epochs=2)


_OF_ANOTHER_DTYPE = Refusal("RuntimeError|ValueError", "dtype|float64")


@program(
    reference="single",
    refused={
        "stage1*": _OF_ANOTHER_DTYPE,
        "stage2*": _OF_ANOTHER_DTYPE,
        "stage3*": _KEEPS_ITS_DTYPE,
        "fsdp*": Refusal("ValueError", "its dtype is fixed"),
    },
)
class data_of_another_dtype(Regression):
    """`p.data = p.data.double()` for all parameters after the second batch; the inputs follow."""

    def loss(self, batch: Any) -> Tensor:
        dtype = self.net[0].weight.dtype  # type: ignore[index, union-attr]
        return F.mse_loss(self(batch[0].to(dtype)), batch[1].to(dtype))  # type: ignore[arg-type]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for param in self.parameters():
                param.data = param.data.double()


class _Halves(Regression):
    def build(self) -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x) for layer in self.net.values())  # type: ignore


@program(reference="ddp_find_unused_parameters_true")
class layer_deleted(_Halves):
    """`del self.net["b"]` after two batches: the optimizer still has the layer's parameters."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            del self.net["b"]


@program(reference="ddp_find_unused_parameters_true")
class tied_late(Regression):
    """Weights of two layers are tied after two batches, by assigning one to the other layer."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.net[2].weight = self.net[0].weight


@program(reference="ddp_find_unused_parameters_true")
def layer_deleted_and_saved(run: Run) -> None:
    """The same, saved in the end; a module without the layer is validated with the weights."""

    class Validated(_Halves):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)

    run.fit(layer_deleted()).save_checkpoint(run.folder / "without.ckpt", weights_only=True)
    fresh = Validated()
    del fresh.net["b"]
    found = run.trainer().validate(fresh, run.loader(2), ckpt_path=str(run.folder / "without.ckpt"))
    run.keep(loss=found[0]["val_loss"])


@program(reference="ddp_find_unused_parameters_true")
class layer_deleted_with_lamb(_Halves):
    """The first layer is deleted, under an optimizer that needs whole tensors; its state is read afterwards."""

    def configure_optimizers(self) -> Any:
        return LAMB(self.parameters(), 0.05)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            del self.net["a"]

    def on_train_batch_end(self, *unused: Any) -> None:
        state = self.optimizers().state[self.net["b"].weight]
        self.log("moment", sum(float(value.norm()) for value in state.values() if isinstance(value, Tensor)))


@program(reference="single", without=("stage0",), refused={"*": _NEW_PARAMETER})
class bias_replaced(Regression):
    """A new `nn.Parameter` takes the place of a bias, and gets a group of its own in the optimizer."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.net[2].bias = nn.Parameter(torch.ones(4, device=self.device))
            self.optimizers().add_param_group({"params": [self.net[2].bias]})


@program(reference="single", without=("stage0",), refused={"*": _NEW_PARAMETER})
class head_replaced(Regression):
    """A new layer takes the place of the last one, and gets a group of its own in the optimizer."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            torch.manual_seed(7)
            self.net[2] = nn.Linear(16, 4).to(self.device)
            self.optimizers().add_param_group({"params": self.net[2].parameters()})


@program(reference="ddp_find_unused_parameters_true")
def layer_deleted_and_saved_whole(run: Run) -> None:
    """A checkpoint with the optimizer after every batch, before and after the layer is deleted."""

    class Saves(layer_deleted):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.02)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.save_checkpoint(run.folder / f"{batch_idx}.ckpt")

    fresh = Saves()
    run.fit(fresh, run.loader(6))
