"""16-bit precisions, against the same program in 32 bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.programs.base import Manual, Regression, Unfreezes, step
from tests.programs.comparison import BOUNDS
from tests.programs.program import Refusal, program
from tests.programs.run import Run, tokens
from tests.support.training import accelerator

_ALL = ("bf16-true", "bf16-mixed", "16-true", "16-mixed")


def _in(precisions: tuple[str, ...], **details: Any) -> Callable[[type[Regression]], None]:
    """A program for each precision, of one module."""

    def register(made: type[Regression]) -> None:
        for precision in precisions:
            suffix = precision.replace("-", "_")
            what = f"{(made.__doc__ or '').rstrip('.')}, in {precision}."
            named = type(f"{made.__name__}_{suffix}", (made,), {"__doc__": what, "__module__": __name__})
            program({"max_epochs": 2}, precision=precision, **details)(named)

    return register


_PARTITIONED = Refusal("MisconfigurationException", "Use `strategy='zeroplus_stage0'`")


@program(refused={f"stage{stage}*": _PARTITIONED for stage in (1, 2, 3)}, on_three_ranks=True)
def double_precision(run: Run) -> None:
    """Lightning's `DoublePrecision`, as a plugin: parameters, batches and new tensors are of float64."""

    class Double(Regression):
        def loss(self, batch: Any) -> Tensor:
            assert batch[0].dtype == torch.ones(1).dtype == next(self.parameters()).dtype == torch.float64
            return super().loss(batch)

    run.fit(Double(), run.loader(), run.loader(), plugins=[DoublePrecision()], precision=None)


class _Low(Regression):
    """A network whose input may come in another precision; it learns fast, for weights of 8 bits to see it."""

    lr = 0.4

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0].to(self.parameter_dtype())).float(), batch[1].float())

    def parameter_dtype(self) -> torch.dtype:
        return next(self.net.parameters()).dtype


@_in(_ALL)
class low(_Low):
    """A network with SGD"""


@_in(("bf16-mixed", "16-mixed"))
class low_adamw(_Low):
    """A network with AdamW"""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, eps=1e-3)


@_in(_ALL)
class low_batch_norm(_Low):
    """A network with BatchNorm"""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


@_in(("bf16-true", "bf16-mixed", "16-mixed"))
class low_layer_norm(_Low):
    """A network with LayerNorm and an integer buffer"""

    def build(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
        net.register_buffer("count", torch.tensor(3))
        return net


class _Rotating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("freqs_cis", torch.polar(torch.ones(4), torch.arange(4.0) / 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        turned = torch.view_as_complex(hidden.float().view(-1, 4, 2)) * self.freqs_cis
        return self.head(torch.view_as_real(turned).flatten(1).to(hidden.dtype))


@_in(("bf16-true", "bf16-mixed", "16-mixed"))
class low_complex_buffer(_Low):
    """RoPE with its complex buffer"""

    def build(self) -> nn.Module:
        return _Rotating()


class _LowManual(_Low, Manual):
    """Manual optimization in low precision."""


@_in(("bf16-mixed", "16-true"))
class low_clip_by_hand(_LowManual):
    """Two backwards, torch's clipping, and the norm logged"""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for columns in (slice(0, 2), slice(2, 4)):
            out = self(batch[0].to(self.parameter_dtype()))[:, columns].float()
            self.manual_backward(F.mse_loss(out, batch[1][:, columns].float()))
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5).float())
        step(self.optimizers())


@_in(("bf16-true", "16-mixed"))
class low_clamped(_Low):
    """Weights clamped after each step, within `zp.gathered`"""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with zp.gathered(self.net), torch.no_grad():
            for param in self.net.parameters():
                param.clamp_(-0.25, 0.25)


@_in(("bf16-true", "bf16-mixed", "16-mixed"), reference="single")
class low_unfrozen(Unfreezes, _Low):
    """A layer that is frozen at first, and unfrozen after an epoch"""


@program(precision="bf16-true", reference_precision="bf16-true")
class low_new_tensors(Regression):
    """Tensors made in `training_step` are of the precision's dtype, in bf16-true: the first state of a GRU cell."""

    def build(self) -> nn.Module:
        return nn.GRUCell(8, 4)

    def loss(self, batch: Any) -> Tensor:
        state = torch.zeros(len(batch[0]), 4, device=self.device)
        self.log("bytes", float(state.element_size()))
        for _ in range(2):
            state = self.net(batch[0], state)
        return F.mse_loss(state, batch[1])


@program(precision="bf16-true")
class low_new_tensors_by_hand(_LowManual):
    """The same in manual optimization, with a clip and a step within `training_step`, which are computed in fp32."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        shift = torch.full((4,), 0.1, device=self.device)
        assert shift.dtype == batch[0].dtype
        self.manual_backward(F.mse_loss(self(batch[0]).float() + shift, batch[1].float()))
        self.clip_gradients(self.optimizers(), 0.37, "norm")  # type: ignore[arg-type]
        step(self.optimizers())


@program(precision="bf16-true")
def low_embedding(run: Run) -> None:
    """An embedding tied to the output, in bf16-true, with a loss in float32."""

    class Tied(Regression):
        lr = 1.0

        def build(self) -> nn.Module:
            return nn.ModuleDict({"embed": nn.Embedding(16, 8), "mix": nn.Linear(8, 8)})

        def loss(self, batch: Any) -> Tensor:
            embed, mix = self.net["embed"], self.net["mix"]  # type: ignore[index]
            logits = torch.tanh(mix(embed(batch[0]))) @ mix.weight.T
            return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[0][:, 1:].flatten() % 8)

    run.fit(Tied(), run.loader(make=tokens), max_epochs=3)


@program({"accumulate_grad_batches": 2, "max_epochs": 3}, precision="bf16-mixed")
class low_accumulate(_Low):
    """Two batches accumulated, in bf16-mixed."""


@program({"gradient_clip_val": 0.5, "max_epochs": 2}, precision="bf16-mixed")
class low_clip(_Low):
    """Lightning's clipping, in bf16-mixed."""


@program(without=("stage*",), bound=BOUNDS["16"])
def loss_scaler(run: Run) -> None:
    """torch's GradScaler in 16-mixed, with clipping, resumed: one rank's gradients overflow, and no rank steps."""

    class Overflows(_Low):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("scale", self.trainer.precision_plugin.scaler.get_scale())  # type: ignore[union-attr]
            return loss * (1e6 if batch_idx == 1 and self.global_rank == 0 else 1)

    def options() -> dict[str, Any]:
        scaler = torch.amp.GradScaler(accelerator(), init_scale=2.0**12, growth_interval=3)
        plugin = MixedPrecision("16-mixed", accelerator(), scaler)
        return {"plugins": [plugin], "precision": None, "gradient_clip_val": 0.5}

    path = str(run.folder / "checkpoint")
    first = run.trainer(max_epochs=1, **options())
    first.fit(Overflows(), run.loader())
    first.save_checkpoint(path)
    run.fit(Overflows(), run.loader(), max_epochs=2, ckpt_path=path, **options())


@program({"max_epochs": 2}, precision="16-true")
class low_backward_overridden(_Low):
    """`def backward(self, loss): loss.backward()`, in 16-true."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class _EveryBackward(_LowManual):
    """Backwards of every kind, of which only some have a loss scale."""

    def part(self, batch: Any, at: int) -> Tensor:
        out = self(batch[0].to(self.parameter_dtype()))
        return F.mse_loss(out[:, at].float(), batch[1][:, at].float())

    def backwards(self, batch: Any) -> None:
        self.part(batch, 0).backward()
        self.manual_backward(self.part(batch, 1))
        weight = self.net[0].weight  # type: ignore[index]
        torch.autograd.grad(self.part(batch, 0), weight)
        self.manual_backward(self.part(batch, 2), create_graph=True)
        self.manual_backward(self.part(batch, 3), inputs=[weight])


@program({"max_epochs": 2}, precision="16-true", reference="single")
class low_every_backward(_EveryBackward):
    """`loss.backward()`, `manual_backward` with all its arguments and `torch.autograd.grad` in one step, in 16-true."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.backwards(batch)
        self.clip_gradients(self.optimizers(), 0.3, "norm")  # type: ignore[arg-type]
        step(self.optimizers())


@program({"max_epochs": 2}, precision="16-true", reference="single")
class low_every_backward_coalesced(_EveryBackward):
    """The same in the strategy's `coalesce()`, where there is one, with the gradients clipped by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.coalesce() if hasattr(strategy, "coalesce") else contextlib.nullcontext():
            self.backwards(batch)
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3).float())
        step(self.optimizers())


@program({"max_epochs": 2}, precision="16-true", reference="single")
class low_several_optimizers(_EveryBackward):
    """Two optimizers, of which one steps between backwards with and without a loss scale, in 16-true."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.part(batch, 0).backward()
        self.manual_backward(self.part(batch, 1))
        step(first)
        self.part(batch, 2).backward()
        step(first)
        step(second)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[at].parameters(), self.lr / 4) for at in (0, 2)]  # type: ignore[index]


@program(
    {"max_epochs": 2},
    precision="16-true",
    reference="single",
    refused={"fsdp*": Refusal("RuntimeError", "Read or write it after the window")},
)
class low_read_in_a_window(_EveryBackward):
    """`param.grad` read and changed in place between backwards in `coalesce()`, in 16-true."""

    lr = 0.05

    def training_step(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.coalesce() if hasattr(strategy, "coalesce") else contextlib.nullcontext():
            self.manual_backward(self.part(batch, 0))
            self.part(batch, 1).backward()
            weight, bias = self.net[2].parameters()  # type: ignore[index]
            assert weight.grad is not None and bias.grad is not None
            weight.grad.mul_(2)
            bias.grad.add_(0.125)
            self.manual_backward(self.part(batch, 2))
            weight.grad.add_(0.0625)
            bias.grad.mul_(0.5)
        step(self.optimizers())


class _NeverZeroed(_LowManual):
    """No `zero_grad()`."""

    lr = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.clip_gradients(self.optimizers(), 0.5, "norm")  # type: ignore[arg-type]
        self.optimizers().step()


@program(precision="bf16-true")
class low_never_zeroed_in_bf16(_NeverZeroed):
    """No `zero_grad()`: clipped gradients add up over the steps, in bf16-true."""


@program(precision="16-true")
class low_never_zeroed_in_fp16(_NeverZeroed):
    """The same in 16-true."""


def _scaled() -> dict[str, Any]:
    scaler = torch.amp.GradScaler(accelerator(), init_scale=2.0**12, growth_interval=3)
    return {"plugins": [MixedPrecision("16-mixed", accelerator(), scaler)], "precision": None}


@program(without=("stage*",), bound=BOUNDS["16"])
def loss_scaler_by_hand(run: Run) -> None:
    """torch's GradScaler with two optimizers in manual optimization, two backwards each; one rank overflows."""

    class Overflows(_LowManual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                with self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
                    self.manual_backward(self.loss(batch) / 2)
                overflows = batch_idx == 1 and self.global_rank == 0
                self.manual_backward(self.loss(batch) * (1e6 if overflows else 0.5))
                step(optimizer)
            self.log("scale", self.trainer.precision_plugin.scaler.get_scale())  # type: ignore[union-attr]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            # An overflow is an infinity or a NaN, by the order of sums.
            norms = [param.grad.norm().float() for param in optimizer.param_groups[0]["params"]]
            self.log("norm", torch.stack(norms).norm().nan_to_num(-1.0, posinf=-1.0))

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[index].parameters(), self.lr) for index in (0, 2)]

    run.fit(Overflows(), run.loader(), max_epochs=2, **_scaled())


@program(without=("stage*",), bound=BOUNDS["16"])
def loss_scaler_of_ddp(run: Run) -> None:
    """torch's GradScaler goes on from a checkpoint that DDP has written."""

    class Small(_Low):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("scale", self.trainer.precision_plugin.scaler.get_scale())
            return super().training_step(batch, batch_idx)

    path = run.folder / "ddp.ckpt"
    first = run.trainer(strategy="ddp", max_epochs=1, **_scaled())
    first.fit(Small(), run.loader())
    first.save_checkpoint(path)
    run.fit(Small(), run.loader(), max_epochs=2, ckpt_path=path, **_scaled())


@program({"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 3}, precision="16-mixed")
class low_accumulate_and_clip(_Low):
    """Two batches accumulated, and Lightning's clipping, in 16-mixed."""
