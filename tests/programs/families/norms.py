"""`zp.GradientNorms`, compared with norms of `param.grad` under DDP."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.programs.base import Manual, Regression
from tests.programs.program import program
from tests.programs.run import Run

_PATTERNS = ["*", "net.0", "*.bias", "net.2.weight", "scale"]
_MEMBERS = [
    lambda name: True,
    lambda name: name.startswith("net.0."),
    lambda name: name.endswith(".bias"),
    lambda name: name == "net.2.weight",
    lambda name: name == "scale",
]


class _ByHand(pl.Callback):
    """What `zp.GradientNorms` is, for whole gradients."""

    norms: dict[str, float]

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        params = {name: param for name, param in pl_module.named_parameters() if id(param) in held}
        squares = {name: 0.0 if p.grad is None else float(p.grad.double().square().sum()) for name, p in params.items()}
        self.norms = {
            pattern: sum(square for name, square in squares.items() if has(name)) ** 0.5
            for pattern, has in zip(_PATTERNS, _MEMBERS, strict=True)
            if any(map(has, squares))
        }
        for logger in trainer.loggers:
            logger.log_metrics({f"grad_norm/{each}": norm for each, norm in self.norms.items()}, trainer.global_step)


def _norms(run: Run) -> Any:
    return _ByHand() if run.strategy.startswith(("ddp", "single")) else zp.GradientNorms(_PATTERNS)


def _fit(run: Run, module: pl.LightningModule, **trainer: Any) -> None:
    """All that is logged is compared, and the norms of the last step."""
    norms = _norms(run)
    run.fit(module, callbacks=[norms], **trainer)
    assert norms.norms["*"] > norms.norms["net.2.weight"] > 0
    run.keep(**{name: torch.tensor(norm, dtype=torch.float64) for name, norm in norms.norms.items()})


class _Scaled(Regression):
    """Sizes that no number of ranks divides, a frozen parameter, one without dimensions, and one that is not used."""

    def build(self) -> nn.Module:
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 1)
        net = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4))
        net[2].bias.requires_grad_(False)
        return net

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(x)


_DDP = "ddp_find_unused_parameters_true"


@program(reference=_DDP, on_three_ranks=True, bound=1e-6, stays=("unused.*",))
def gradient_norms(run: Run) -> None:
    """`zp.GradientNorms` by parameter, module and pattern, of several batches, which are clipped afterwards."""
    _fit(run, _Scaled(), gradient_clip_val=0.1, accumulate_grad_batches=2)


@program(reference=_DDP, bound=1e-6, stays=("unused.*",))
def gradient_norms_clipped_by_hand(run: Run) -> None:
    """`zp.GradientNorms` in a manual loop of two backwards, whose gradient is clipped by norm, and then by value."""

    class Clips(_Scaled, Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            for rows in zip(*(part.chunk(2) for part in batch), strict=True):
                self.manual_backward(self.loss(rows))
            how = ("norm", 0.3) if batch_idx % 2 else ("value", 0.02)
            self.clip_gradients(optimizer, how[1], how[0])
            optimizer.step()

    _fit(run, Clips())


class _WithScale(Regression):
    def build(self) -> nn.Module:
        self.scale = nn.Parameter(torch.tensor(1.5))
        return super().build()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale


@program(precision="16-true", without=("fsdp*",))
def gradient_norms_in_fp16(run: Run) -> None:
    """`zp.GradientNorms` in fp16, with a loss scale."""
    _fit(run, _WithScale())


@program(precision="16-mixed", reference_precision="16-mixed", without=("fsdp*",))
def gradient_norms_in_16_mixed(run: Run) -> None:
    """`zp.GradientNorms` in 16-mixed, whose first gradients overflow."""
    _fit(run, _WithScale())


class _ScaledByHand(Manual):
    """With a parameter without dimensions."""

    def build(self) -> nn.Module:
        self.scale = nn.Parameter(torch.tensor(1.5))
        return super().build()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(x)


@program(bound=1e-6)
def gradient_norms_of_two_optimizers(run: Run) -> None:
    """`zp.GradientNorms` with two optimizers, one of which clips."""

    class Two(_ScaledByHand):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            first, second = self.optimizers()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(first, 0.05, "norm")
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD(self.net[0].parameters(), 0.1, 0.9)  # type: ignore[index]
            return first, torch.optim.Adam([self.scale, *self.net[2].parameters()], 0.01)  # type: ignore[index]

    _fit(run, Two())


@program(bound=1e-6)
def gradient_norms_of_shared_parameters(run: Run) -> None:
    """`zp.GradientNorms` with two optimizers that use the same gradient; one clips it, and they take turns."""

    class Both(_ScaledByHand):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            first, second = self.optimizers()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(first, 0.05, "norm")
            for optimizer in (first, second) if batch_idx % 2 else (second, first):
                optimizer.step()
            first.zero_grad()

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD(self.parameters(), 0.1, 0.9)
            return first, torch.optim.Adam([self.scale, *self.net.parameters()], 0.01)

    _fit(run, Both())


@program(reference=_DDP, bound=1e-6, stays=("unused.*",))
def gradient_norms_after_a_look(run: Run) -> None:
    """`zp.GradientNorms` after a hook that has read and changed `param.grad`."""

    class Looks(_Scaled):
        def on_after_backward(self) -> None:
            for param in self.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.5)

    _fit(run, Looks())


@program(unmeasured=("grad_norm/*",))
def gradient_that_is_not_finite(run: Run) -> None:
    """`zp.GradientNorms` names the parameter, the rank, the backward and the step of a gradient that is infinite."""

    class Overflows(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            for number in range(3):
                loss = self.loss(batch)
                if (batch_idx, number, self.global_rank) == (2, 1, 1):
                    loss = loss + torch.inf * self.net[2].bias.sum()  # type: ignore[index]
                self.manual_backward(loss)
            if batch_idx != 2:
                optimizer.step()
            else:
                seen.on_before_optimizer_step(self.trainer, self, optimizer)
                optimizer.zero_grad()

    seen = zp.GradientNorms()
    run.fit(Overflows(), callbacks=[seen])
    assert [each[1:] for each in seen.not_finite] == [(2, 1, "net.2.bias")], seen.not_finite
    assert seen.not_finite[0].step == 2
