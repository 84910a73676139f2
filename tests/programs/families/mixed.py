"""Mixed precision: fp32 weights, a forward under autocast, and in 16-mixed a loss scale; against DDP in the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from tests.programs.base import Manual, Regression, step
from tests.programs.fabric_base import fabric_program, make_net, sgd
from tests.programs.program import COMPILE, Refusal, program
from tests.programs.run import Run
from tests.support.training import accelerator

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: FSDP2 gathers 16-bit weights, and casts what goes into a unit.
_OURS = ("fsdp*",)


def _in_both(trainer: Mapping[str, Any] = MappingProxyType({}), **details: Any) -> Callable[[type[Regression]], None]:
    """A program for each mixed precision, of one module."""

    def register(made: type[Regression]) -> None:
        for precision in ("bf16-mixed", "16-mixed"):
            name = f"{made.__name__}_{precision.replace('-', '_')}"
            named = type(name, (made,), {"__doc__": f"{made.__doc__}, in {precision}.", "__module__": __name__})
            given = {"precision": precision, "reference_precision": precision, **details}
            program({"max_epochs": 2, **trainer}, **given)(named)

    return register


def code(value: Tensor) -> float:
    """A dtype, as a metric."""
    return float(_DTYPES.index(value.dtype))


class _Noted(Regression):
    """The dtypes of everything are logged."""

    def loss(self, batch: Any) -> Tensor:
        out = self(batch[0])
        loss = F.mse_loss(out, batch[1])
        made = {"in": batch[0], "out": out, "loss": loss, "new": torch.ones(1), "param": next(self.parameters())}
        self.log_dict({f"dtype of {name}": code(value) for name, value in made.items()})
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, param in self.named_parameters():
            assert param.grad is not None
            self.log_dict({f"dtype of {name}": code(param), f"dtype of {name}.grad": code(param.grad)})
        norms = [param.grad.norm() for param in self.parameters() if param.grad is not None]
        self.log("norm", torch.stack(norms).norm())


@_in_both(without=_OURS)
class mixed_dtypes_of(_Noted):
    """The dtypes of inputs, outputs, losses, parameters and gradients, and the norm of unscaled gradients"""


@_in_both({"gradient_clip_val": 0.3, "accumulate_grad_batches": 2, "max_epochs": 3}, also=COMPILE)
class mixed_accumulates_and_clips(Regression):
    """Two batches accumulated, and Lightning's clipping"""


@_in_both({"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"})
class mixed_clips_values(Regression):
    """Lightning's clipping by value"""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.conv = nn.LayerNorm(8), nn.Conv1d(4, 4, 3, padding=1)
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x.view(-1, 4, 2))
        hidden = hidden + self.attend(hidden, hidden, hidden, need_weights=False)[0]
        hidden = hidden + F.gelu(self.conv(self.norm(hidden)))
        return F.linear(hidden.mean(1), self.head.weight) + self.head(hidden[:, 0])


class _Attends(Regression):
    def build(self) -> nn.Module:
        return _Block()

    def configure_optimizers(self) -> Any:
        # The gradient of the keys' bias is 0 but for rounding, which kernels do differently: it is small beside `eps`.
        return torch.optim.AdamW(self.parameters(), 0.01, eps=1e-2)


@_in_both(without=("stage3*", *_OURS))
class mixed_attention(_Attends):
    """Attention, LayerNorm, a convolution, linear layers on three dimensions, a weight used twice, and AdamW"""


# The backward of DeepSpeed's linear layer multiplies by other kernels than torch's, whose sums differ in the last of 8
# or 11 bits; Adam divides by the size of a gradient.
@_in_both(without=("stage[012]*", *_OURS), bound=1.5e-2)
class mixed_attention_gathered(_Attends):
    """The same where weights are gathered"""


@program(
    precision="bf16-mixed",
    reference_precision="bf16-mixed",
    without=_OURS,
    refused={"stage[123]*": Refusal("MisconfigurationException", "LBFGS.*strategy='zeroplus_stage0'")},
)
class mixed_lbfgs(Regression):
    """LBFGS in bf16-mixed."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)


class _ByHand(Manual):
    def backwards(self, batch: Any) -> None:
        """Two: Lightning's plugin scales both."""
        for columns in (slice(0, 2), slice(2, 4)):
            self.manual_backward(F.mse_loss(self(batch[0])[:, columns], batch[1][:, columns]))


@_in_both()
class mixed_backwards(_ByHand):
    """Two backwards per step"""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.backwards(batch)
        step(self.optimizers())


@_in_both()
class mixed_coalesced(_ByHand):
    """The same in the strategy's `coalesce()`, where there is one"""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.coalesce() if hasattr(strategy, "coalesce") else contextlib.nullcontext():
            self.backwards(batch)
        step(self.optimizers())


@program({"max_epochs": 2}, precision="bf16-mixed", reference_precision="bf16-mixed")
class mixed_clips_by_hand(_ByHand):
    """Two backwards, torch's clipping, and the norm logged, in bf16-mixed."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.backwards(batch)
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5))
        step(self.optimizers())


def scale_of(trainer: Any) -> float:
    """The loss scale."""
    return float(trainer.precision_plugin.scaler.get_scale())


class _Overflows(Regression):
    """On one rank, gradients of the second batch overflow. A schedule wraps `optimizer.step`."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("scale", scale_of(self.trainer))
        return loss * (1e6 if batch_idx == 1 and self.global_rank == 0 else 1)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("scale after", scale_of(self.trainer))


def _small_scale() -> dict[str, Any]:
    """A loss scale of 2**12, which grows after three steps."""
    scaler = torch.amp.GradScaler(accelerator(), init_scale=2.0**12, growth_interval=3)
    return {"plugins": [MixedPrecision("16-mixed", accelerator(), scaler)], "precision": None}


_SCALED = {"precision": "16-mixed", "reference_precision": "16-mixed"}


@program(**_SCALED)
def mixed_overflows(run: Run) -> None:
    """In 16-mixed, one rank's gradients overflow: no rank steps, and the loss scale is halved; later it grows."""
    run.fit(_Overflows(), run.loader(6), max_epochs=2, gradient_clip_val=0.5, **_small_scale())


@program({"max_epochs": 2}, **_SCALED)
class mixed_first_scale(_Overflows):
    """The same with the loss scale that 16-mixed begins with."""


@program(**_SCALED)
def mixed_resumes_scale(run: Run) -> None:
    """In 16-mixed, a fit that is resumed after an overflow goes on with the loss scale, and grows it as early."""
    path = str(run.folder / "checkpoint")
    first = run.trainer(max_epochs=1, **_small_scale())
    first.fit(_Overflows(), run.loader())
    first.save_checkpoint(path)
    run.fit(_Overflows(), run.loader(), max_epochs=3, ckpt_path=path, **_small_scale())


@program(**_SCALED, without=_OURS)
def mixed_several_optimizers(run: Run) -> None:
    """In 16-mixed, two optimizers with a backward each, one of which overflows on a rank: each has steps of its own."""

    class Two(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
                loss = self.loss(batch) * (1e6 if batch_idx == 1 and number == self.global_rank == 0 else 1)
                self.manual_backward(loss)
                step(optimizer)
                self.zero_grad()
                self.log(f"scale {number}", scale_of(self.trainer))

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[at].parameters(), 0.1) for at in (0, 2)]  # type: ignore[index]

    run.fit(Two(), run.loader(), max_epochs=2, **_small_scale())


@_in_both({"limit_val_batches": 2}, without=_OURS)
class mixed_evaluates(_Noted):
    """Validation, then a test: outputs have the dtype that DDP's have"""


@program(precision="bf16-mixed", reference_precision="bf16-mixed", without=_OURS)
def mixed_evaluates_only(run: Run) -> None:
    """`trainer.validate` and `trainer.predict` without a fit, in bf16-mixed."""

    class Predicts(_Noted):
        def predict_step(self, batch: Any) -> Tensor:
            return self(batch[0])

    module = Predicts()
    run.trainer().validate(module, run.loader(), verbose=False)
    (first, *_) = run.trainer().predict(module, run.loader())  # type: ignore[misc]
    run.keep(predicted=first)  # type: ignore[arg-type]


def _in_fabric(run: Run) -> None:
    fabric = run.fabric()
    net = make_net()
    run.compare(net)
    model, optimizer = fabric.setup(net, sgd(net))
    for number, batch in enumerate(run.loader()):
        out = model(batch[0])
        loss = F.mse_loss(out, batch[1])
        with fabric.autocast():
            low = torch.stack([batch[1] @ batch[1].T, batch[1] @ batch[1].T]).float().mean()
        fabric.backward(loss)
        fabric.backward(F.l1_loss(model(batch[0]), batch[1]) * 0.5)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        run.keep(**{f"norm {number}": norm, "out": out, "loss": loss, "low": low})
        run.keep(**{f"dtype of {name}.grad": code(p.grad) for name, p in net.named_parameters()})  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        run.keep(predicted=model(batch[0]))


@fabric_program(precision="bf16-mixed", reference_precision="bf16-mixed")
def mixed_fabric_bf16(run: Run) -> None:
    """Fabric in bf16-mixed: two `fabric.backward` per step, `fabric.clip_gradients`, `fabric.autocast`, evaluation."""
    _in_fabric(run)


@fabric_program(**_SCALED)
def mixed_fabric_fp16(run: Run) -> None:
    """The same in 16-mixed."""
    _in_fabric(run)
