"""Weights read and written by hand: before, during and after a fit."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.programs.base import Manual, Regression, Swaps, step
from tests.programs.program import program
from tests.programs.run import Run


def _other_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(p.shape, generator=generator) / 4 for name, p in Regression().net.named_parameters()}


class _Loads(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


@program(on_three_ranks=True)
class load_in_on_fit_start(_Loads):
    """`load_state_dict` in `on_fit_start`."""

    def on_fit_start(self) -> None:
        self.net.load_state_dict(_other_weights())


@program()
class load_in_on_train_start(_Loads):
    """`load_state_dict` of the whole module in `on_train_start`."""

    def on_train_start(self) -> None:
        self.load_state_dict({f"net.{name}": value for name, value in _other_weights().items()})


@program()
class load_in_mid_training(_Loads):
    """`load_state_dict` of a layer after the second batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            weights = _other_weights()
            self.net[0].load_state_dict({"weight": weights["0.weight"], "bias": weights["0.bias"]})  # type: ignore[index]


@program(on_three_ranks=True)
class initialized_in_on_train_start(_Loads):
    """`torch.nn.init` in `on_train_start`, with the same seed on all ranks."""

    def on_train_start(self) -> None:
        for seed, layer in enumerate(self.net.children()):
            if isinstance(layer, nn.Linear):
                torch.manual_seed(seed)
                nn.init.xavier_normal_(layer.weight)
                nn.init.constant_(layer.bias, 0.1)


@program()
def reset_layer(run: Run) -> None:
    """`reset_parameters()` of a layer at the start of an epoch."""

    class Resets(Regression):
        def build(self) -> nn.Module:
            return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))

        def on_train_epoch_start(self) -> None:
            torch.manual_seed(self.current_epoch)
            self.net[2].reset_parameters()  # type: ignore[index]

    run.fit(Resets(), run.loader(2), max_epochs=3)


@program()
def read_in_evaluation(run: Run) -> None:
    """Weights are read in `validate`, `test` and `predict`, which run in inference mode: a norm, a product, a slice."""

    class Reads(_Loads):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            weight: Any = self.net[0].weight  # type: ignore[index]
            self.log("norm", weight.norm())
            self.log("product", (batch[0] @ weight.t()).square().mean(), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return batch[0][:, :2] @ self.net[0].weight[:2, :2] + self.net[2].bias.detach().sum()  # type: ignore[index]

    module = Reads()
    trainer = run.fit(module, val=run.loader(2))
    trainer.validate(module, run.loader(2), verbose=False)
    trainer.test(module, run.loader(2), verbose=False)
    run.keep(predicted=torch.cat(trainer.predict(module, run.loader(2))))  # type: ignore[arg-type]


def _clamp(module: nn.Module) -> None:
    for param in module.parameters():
        param.data.clamp_(-0.2, 0.2)


@program()
class wgan_clamp(Manual):
    """WGAN: `p.data.clamp_()` after each step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        step(self.optimizers())
        _clamp(self.net)


class _MaxNorm(nn.Linear):
    """Keeps its weight's rows within a ball, as convolutions for electroencephalograms do."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        self.bias.data.clamp_(-0.01, 0.01)
        return super().forward(x)


@program(on_three_ranks=True)
class written_in_forward(Regression):
    """A layer that writes its own weight in `forward()`, with a maximal norm; another is used twice."""

    def build(self) -> nn.Module:
        twice = _MaxNorm(8, 8)
        return nn.Sequential(_MaxNorm(8, 8), nn.Tanh(), twice, nn.Tanh(), twice, nn.Linear(8, 4))


@program(on_three_ranks=True)
class written_in_forward_of_a_branch(Regression):
    """A layer that writes its own weight in `forward()` is used once or twice, by the rank and the batch."""

    def build(self) -> nn.Module:
        return nn.Sequential(_MaxNorm(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.net[0](batch[0])  # type: ignore[index]
        if batch_idx % 3 == self.global_rank:
            x = self.net[0](torch.tanh(x))  # type: ignore[index]
        return F.mse_loss(self.net[2](self.net[1](x)), batch[1])  # type: ignore[index]


@program(on_three_ranks=True)
class wgan_clamp_gathered(Manual):
    """The same within `zp.gathered(module)`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        step(self.optimizers())
        with zp.gathered(self.net):
            _clamp(self.net)


@program(on_three_ranks=True)
class non_negative(Regression):
    """A layer is kept non-negative in `on_train_batch_end`, under `torch.no_grad()`."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.net[2].weight.clamp_(min=0)  # type: ignore[index]


@program()
class non_negative_gathered(Regression):
    """The same within `zp.gathered([param])`."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with zp.gathered([self.net[2].weight]), torch.no_grad():  # type: ignore[index]
            self.net[2].weight.clamp_(min=0)  # type: ignore[index]


@program()
class max_norm(Regression):
    """Rows are scaled to a largest norm, by assigning `weight.data`."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight = self.net[0].weight  # type: ignore[index]
        weight.data = weight.data * (0.3 / weight.data.norm(dim=1, keepdim=True)).clamp(max=1)


@program()
class max_norm_gathered(Regression):
    """The same, copied in place, within `zp.gathered`."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight = self.net[0].weight  # type: ignore[index]
        with zp.gathered([weight]), torch.no_grad():
            weight.mul_((0.3 / weight.norm(dim=1, keepdim=True)).clamp(max=1))


@program(trainer={"max_epochs": 2})
class shrink_and_perturb(Regression):
    """Weights shrunk and perturbed at the start of an epoch, within `zp.gathered(self)`."""

    def on_train_epoch_start(self) -> None:
        generator = torch.Generator().manual_seed(self.current_epoch)
        with zp.gathered(self), torch.no_grad():
            for param in self.parameters():
                param.mul_(0.9).add_(torch.randn(param.shape, generator=generator).to(self.device), alpha=0.01)


@program()
def written_after_validation(run: Run) -> None:
    """Weights written in `on_validation_end`, which follows forwards of the whole model."""

    class Writes(Regression):
        def on_validation_end(self) -> None:
            with zp.gathered(self.net), torch.no_grad():
                for param in self.net.parameters():
                    param.mul_(0.9)

    run.fit(Writes(), val=run.loader(2), val_check_interval=2, max_epochs=2)


@program(on_three_ranks=True)
class logged_weight_norm(Regression):
    """The norm of each weight is logged."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, param in self.net.named_parameters():
            self.log(f"norm/{name}", param.detach().norm())


@program()
class logged_weight_norm_gathered(Regression):
    """The same within `zp.gathered(self)`."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with zp.gathered(self):
            for name, param in self.net.named_parameters():
                self.log(f"norm/{name}", param.detach().norm())


def _sam_step(self: Manual, batch: Any) -> None:
    """Sharpness-aware minimization: gradients at the weights moved uphill, applied at the weights themselves."""
    optimizer = self.optimizers()
    self.manual_backward(self.loss(batch))
    norm = torch.nn.utils.get_total_norm([param.grad for param in self.parameters() if param.grad is not None])
    with zp.gathered(self), torch.no_grad():
        moves = [0.05 * param.grad / norm for param in self.parameters()]  # type: ignore[operator]
        for param, move in zip(self.parameters(), moves, strict=True):
            param.add_(move)
    optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    with zp.gathered(self), torch.no_grad():
        for param, move in zip(self.parameters(), moves, strict=True):
            param.sub_(move)
    step(optimizer)


@program(on_three_ranks=True)
class sam_by_hand(Manual):
    """Sharpness-aware minimization by hand: `p.add_(e)`, a second backward, `p.sub_(e)`, within `zp.gathered`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        _sam_step(self, batch)


@program(on_three_ranks=True)
def swapped_by_assignment(run: Run) -> None:
    """A moving average by hand, swapped in for validation by `p.data = average`, and out by `p.data = backup`."""

    class Swapped(Swaps):
        def take(self, param: nn.Parameter) -> Tensor:
            return param.data

    run.fit(Swapped(), val=run.loader(2), max_epochs=3)


@program()
class fast_weights(Regression):
    """`torch.func.functional_call` of the network with weights of a buffer, beside its own."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleDict()
        for index, (name, value) in enumerate(_other_weights().items()):
            self.register_buffer(f"other_{index}", value)
            self.names = [*getattr(self, "names", []), name]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        others = {name: getattr(self, f"other_{index}") for index, name in enumerate(self.names)}
        out = torch.func.functional_call(self.net, others, (batch[0],))
        return self.loss((batch[0], batch[1] + 0.1 * out))


@program()
class snapshot_in_buffers(Regression):
    """Weights at the start of the epoch are copied to buffers; the loss pulls towards them (EWC), in `zp.gathered`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("anchor", torch.zeros(16, 8))

    def on_train_epoch_start(self) -> None:
        with zp.gathered([self.net[0].weight]):  # type: ignore[index]
            weight = self.net[0].weight.detach()  # type: ignore[index]
            self.anchor.copy_(weight.full_tensor() if hasattr(weight, "full_tensor") else weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        anchored = F.linear(batch[0], self.anchor).tanh().mean(1, keepdim=True)
        return self.loss((batch[0], batch[1] + anchored))


@program()
class deep_copy(Regression):
    """DPO: `on_fit_start` copies the network as a frozen reference by `copy.deepcopy`."""

    gathered = False

    def on_fit_start(self) -> None:
        with zp.gathered(self.net) if self.gathered else torch.no_grad():
            self.reference = [copy.deepcopy(self.net).requires_grad_(False)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            kept = self.reference[0](batch[0])
        self.log("distance", F.mse_loss(self(batch[0]), kept), sync_dist=True)
        return self.loss((batch[0], batch[1] + kept))


@program()
class deep_copy_gathered(deep_copy):
    """The same within `zp.gathered`."""

    gathered = True


class _Teacher(Regression):
    """A student, and a teacher that no optimizer has."""

    def build(self) -> nn.Module:
        teacher = super().build().requires_grad_(False)
        return nn.ModuleDict({"student": super().build(), "teacher": teacher})

    def forward(self, x: Tensor) -> Tensor:
        return self.net["student"](x)  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.net["teacher"](batch[0])  # type: ignore[index]
        loss = self.loss(batch) + F.mse_loss(self(batch[0]), target)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net["student"].parameters(), 0.01)  # type: ignore[index]

    @torch.no_grad()
    def follow(self) -> None:
        """Move the teacher towards the student, in place."""
        pairs = zip(self.net["teacher"].parameters(), self.net["student"].parameters(), strict=True)  # type: ignore[index]
        for q, p in pairs:
            q.data.mul_(0.9).add_(p.data, alpha=0.1)


@program(on_three_ranks=True)
class byol_teacher(_Teacher):
    """BYOL, MoCo, DINO: `q.data.mul_(m).add_(p.data, alpha=1 - m)` after each batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.follow()


@program()
class byol_teacher_gathered(_Teacher):
    """The same within `zp.gathered`."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with zp.gathered(self.net):
            self.follow()


@program(on_three_ranks=True)
class ema_update(_Teacher):
    """`zp.ema_update(teacher, student, decay)` after each batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        zp.ema_update(self.net["teacher"], self.net["student"], 0.9)  # type: ignore[index]


@program(trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1})
class ema_update_of_steps(_Teacher):
    """`zp.ema_update` in `on_before_zero_grad`, as Lightning's hook for it has it, with accumulation and clipping."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        zp.ema_update(self.net["teacher"], self.net["student"], 0.9)  # type: ignore[index]


@program()
class dqn_target(_Teacher):
    """DQN: the target takes the online network's weights by `load_state_dict(state_dict())` every second batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            self.net["teacher"].load_state_dict(self.net["student"].state_dict())  # type: ignore[index]


@program(on_three_ranks=True)
class dqn_target_gathered(_Teacher):
    """The same within `zp.gathered`."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            with zp.gathered(self.net):
                self.net["teacher"].load_state_dict(self.net["student"].state_dict())  # type: ignore[index]


@program()
class momentum_queue(_Teacher):
    """MoCo: a queue of the teacher's keys in a buffer, which all ranks fill alike."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(12, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            keys = self.all_gather(self.net["teacher"](batch[0])).flatten(0, -2)[:4]  # type: ignore[index]
            self.queue = torch.cat([keys, self.queue])[:12]
        return super().training_step(batch, batch_idx) + (self(batch[0]) @ self.queue.T).square().mean()


@program(on_three_ranks=True)
def read_on_one_rank(run: Run) -> None:
    """Rank 0 alone looks at a weight now and then: after a batch, and in validation."""

    class ReadOnOneRank(Regression):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_rank == 0 and batch_idx % 2:
                self.largest = self.net[0].weight.detach().abs().max()  # type: ignore[index]

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_rank == 0:
                self.first = [param.flatten()[0].item() for param in self.net.parameters()]

    run.fit(ReadOnOneRank(), run.loader(6), val=run.loader(2), max_epochs=2)


@program(on_three_ranks=True)
def written_in_many_ways(run: Run) -> None:
    """Weights are written in hooks: by index, by a view that was kept, under `no_grad`, and by `data`."""

    class WrittenInManyWays(Regression):
        def on_train_epoch_start(self) -> None:
            with torch.no_grad():
                self.net[0].weight[0] = 0.1  # type: ignore[index]
                self.net[0].bias += 0.01  # type: ignore[index]
            row = self.net[2].weight.data[1]  # type: ignore[index]
            row.mul_(0.5)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.net[2].weight.data = 0.9 * self.net[2].weight.data  # type: ignore[index]
                self.net[2].bias.data.zero_()  # type: ignore[index]

    run.fit(WrittenInManyWays(), run.loader(4), val=run.loader(2), max_epochs=2)


@program()
def read_in_validation(run: Run) -> None:
    """The norm of weights is logged in validation, whose end goes into the loss of the next batch as a penalty."""

    class ReadInValidation(Regression):
        penalty: Any = 0.0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("norm", self.net[0].weight.norm(), sync_dist=True)  # type: ignore[index]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.penalty = 0.1 * (self.net[0].weight - 1).square().mean()  # type: ignore[index]

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) + (self.penalty if self.training else 0.0)

    run.fit(ReadInValidation(), run.loader(4), val=run.loader(2), max_epochs=2, val_check_interval=2)


@program(imports=("deepspeed",))
class gathered_by_deepspeed(Regression):
    """Weights are read after each batch, and written within `deepspeed.zero.GatheredParameters`."""

    def writes(self) -> bool:
        """Whether this rank does; where nothing is partitioned the context does nothing."""
        return True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        from deepspeed import zero

        weight: Any = self.net[0].weight  # type: ignore[index]
        self.log("norm", weight.detach().norm())
        with zero.GatheredParameters(list(self.parameters()), modifier_rank=0), torch.no_grad():
            for param in self.parameters():
                if self.writes():
                    param.mul_(0.9)
        self.log("norm after", weight.detach().norm())


@program(imports=("deepspeed",), reference="single", without=("stage[012]*", "fsdp*"))
class gathered_by_deepspeed_for_one_writer(gathered_by_deepspeed):
    """The same at stage 3, where DeepSpeed gives all ranks what rank 0 writes."""

    def writes(self) -> bool:
        return self.global_rank == 0


@program(imports=("deepspeed",))
class gathered_by_deepspeed_after_a_sample(gathered_by_deepspeed):
    """The same, after rank 0 alone has run the module, and after a barrier."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            with torch.no_grad():
                self(batch[0])
        self.trainer.strategy.barrier()
        super().on_train_batch_end(outputs, batch, batch_idx)


def _two_layers() -> nn.ModuleDict:
    return nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 4)})


@program()
class written_while_it_is_gathered(Manual):
    """A bias is written before the forward, when it may be gathered ahead already, in three ways."""

    def build(self) -> nn.Module:
        return _two_layers()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        net: Any = self.net
        _, bias = net["b"].parameters()
        with torch.no_grad():
            if batch_idx % 3 == 0:
                bias.copy_(torch.arange(4, device=self.device) / 10)
            elif batch_idx % 3 == 1:
                bias.data = torch.arange(4, device=self.device) / 5
            else:
                bias.data.mul_(0.5)
        self.manual_backward(F.mse_loss(net["b"](net["a"](batch[0])), batch[1]))
        step(self.optimizers())


@program()
class touched_before_the_forward(Regression):
    """Weights are logged and written in `training_step` before the forward, and read between two networks."""

    def build(self) -> nn.Module:
        return _two_layers()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        net: Any = self.net
        self.log("norm", net["b"].weight.detach().norm(), sync_dist=True)
        net["b"].weight.data.clamp_(-0.3, 0.3)
        hidden = net["a"](batch[0])
        scale = 1 / (1 + net["b"].weight.data.abs().amax())
        return F.mse_loss(net["b"](scale * hidden), batch[1])
