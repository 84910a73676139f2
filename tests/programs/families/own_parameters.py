"""Parameters that are in no layer: a LightningModule's own, scalars, and what its children share."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.base import Manual, Regression, step
from tests.programs.program import program
from tests.programs.run import Run


class _Clip(Regression):
    """Two towers of layers, and a temperature that the module itself has."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 6)
        self.logit_scale = nn.Parameter(torch.tensor(0.7))

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))

    def loss(self, batch: Any) -> Tensor:
        images, texts = F.normalize(self(batch[0]), dim=-1), F.normalize(self.other(batch[1]), dim=-1)
        logits = self.logit_scale.exp() * images @ texts.t()
        return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


@program(on_three_ranks=True)
class temperature_of_the_module(_Clip):
    """CLIP: a scalar temperature of the LightningModule, which is logged and clamped after each step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.logit_scale.clamp_(0, 0.72)
        self.log("scale", self.logit_scale.exp().item())


@program()
class scale_of_the_inputs_type(Regression):
    """A parameter of the module is cast by `self.scale.type_as(x)`, to the inputs' float64."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 1.5, 2.0]))

    def loss(self, batch: Any) -> Tensor:
        targets = batch[1].double()
        assert self.scale.type_as(targets).dtype == torch.float64
        return ((self(batch[0]).double() * self.scale.type_as(targets) - targets) ** 2).mean().float()


@program(precision="bf16-mixed", reference_precision="bf16-mixed")
class temperature_in_mixed_precision(_Clip):
    """CLIP's temperature in bf16-mixed."""


# At ZeRO stages the module is of 16 bits.
@program(precision="bf16-mixed", reference_precision="bf16-mixed", without=("stage*",))
class temperature_stays_in_full_precision(_Clip):
    """CLIP's temperature in bf16-mixed: it is of fp32, when it has been used, too."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.log("in fp32", float(self.logit_scale.dtype == torch.float32))
        return loss


@program(trainer={"gradient_clip_val": 0.05, "accumulate_grad_batches": 2})
class temperature_accumulated(_Clip):
    """CLIP's temperature with accumulation and clipping, and AdamW without decay for it."""

    def configure_optimizers(self) -> Any:
        decayed = [param for param in self.parameters() if param.ndim > 1]
        others = [param for param in self.parameters() if param.ndim <= 1]
        return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], 0.01)


@program()
def temperature_resumes(run: Run) -> None:
    """CLIP is saved after an epoch, and resumes; the weights in the checkpoint are read."""

    class Adam(_Clip):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.01)

    trainer = run.fit(Adam(), max_epochs=1)
    path = run.folder / "clip.ckpt"
    trainer.save_checkpoint(path)
    run.fit(Adam(), max_epochs=2, ckpt_path=path)


@program(on_three_ranks=True)
class parameters_of_the_module(Regression):
    """A prompt, a matrix and a list of biases that the LightningModule itself has."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(5, 8) / 4)
        self.project = nn.Parameter(torch.randn(4, 4) / 2)
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(4))])

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.softmax(x @ self.prompt.t(), dim=-1) @ self.prompt
        return self.net(mixed + self.biases[0]) @ self.project + self.biases[1]


@program()
class parameter_of_the_module_by_hand(Manual):
    """A parameter of the LightningModule: its gradient is logged, scaled and clipped by hand, in two micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.shift

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for part in range(2):
            self.manual_backward(self.loss([each[part::2] for each in batch]) / 2)
        self.log("slope", self.shift.grad.norm())  # type: ignore[union-attr]
        self.shift.grad.mul_(0.5)  # type: ignore[union-attr]
        self.clip_gradients(optimizer, 0.3, "norm")
        step(optimizer)


@program(stays=("frozen",))
class frozen_parameter_of_the_module(Regression):
    """A frozen parameter of the LightningModule, and one that is unfrozen after an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)
        self.later = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.frozen + self.later

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.later.requires_grad_(True)


class _Reconstructs(Regression):
    """An encoder and a decoder with one weight, each a child."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(8, 4)
        self.decoder.weight = self.net[0].weight  # type: ignore[index]

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.net(x))


@program(on_three_ranks=True)
class children_share_a_weight(_Reconstructs):
    """Two children of the LightningModule share a weight."""


@program(precision="bf16-mixed", reference_precision="bf16-mixed")
class children_share_a_weight_in_mixed_precision(_Reconstructs):
    """Two children of the LightningModule share a weight, in bf16-mixed."""


@program()
class only_parameters(Regression):
    """A LightningModule without any layer: a linear regression."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 4) / 4), nn.Parameter(torch.zeros(4))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def build(self) -> nn.Module:
        return nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight + self.bias) * self.scale


@program(on_three_ranks=True)
class scalars_of_each_block(Regression):
    """Three blocks, each with a scalar gate, which starts at zero and is regularized."""

    def build(self) -> nn.Module:
        return nn.Sequential(*(_Gated() for _ in range(3)), nn.Linear(8, 4))

    def loss(self, batch: Any) -> Tensor:
        gates = [block.gate for block in self.net[:3]]  # type: ignore[index, union-attr]
        return super().loss(batch) + 0.01 * torch.stack(gates).square().sum()


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(8, 8), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * torch.tanh(self.layer(x))


@program()
class averaged_copy_of_the_module(_Clip):
    """An exponential average of all parameters, in a copy of the module that is made in `on_fit_start`."""

    def on_fit_start(self) -> None:
        self.kept = [copy.deepcopy(self)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for mean, param in zip(self.kept[0].parameters(), self.parameters(), strict=True):
                mean.lerp_(param.detach(), 0.5)
        self.log("mean", sum(mean.square().sum() for mean in self.kept[0].parameters()))


@program()
def whole_weights_are_loaded(run: Run) -> None:
    """`load_state_dict` in `on_fit_start`, and the state dict after a validation epoch, with scalars of the module."""
    given = {name: torch.full_like(value, 0.1) for name, value in _Clip().state_dict().items()}

    class Loads(_Clip):
        def on_fit_start(self) -> None:
            self.load_state_dict(given)

        def on_validation_epoch_end(self) -> None:
            self.log("total", sum(value.double().square().sum() for value in self.state_dict().values()))

    run.fit(Loads(), run.loader(), run.loader())
