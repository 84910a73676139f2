"""Loops that read and write weights, as users write them, and what is left when they have run under a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from tests.support.training import trainer, zero_plus

STEPS = 4
LOOPS: dict[str, type[Program]] = {}


class Program(pl.LightningModule):
    """A student with two layers and a norm, and a frozen teacher like it. Subclasses touch their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: dict[str, Any] = {}
        if not type(self).late:
            self.build()

    late = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        LOOPS[cls.__name__] = cls

    def build(self) -> None:
        torch.manual_seed(0)
        self.student, self.teacher = (
            nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2)
        )
        self.teacher.requires_grad_(False)

    def configure_model(self) -> None:
        if not hasattr(self, "student"):
            self.build()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        self.inside(index)
        x, y = batch
        with torch.no_grad():
            target = self.teacher(x)
        loss = (self.student(x) - y).square().mean() + 0.1 * (self.student(x) - target).square().mean()
        self.manual_backward(loss + self.penalty())
        optimizer.step()
        optimizer.zero_grad()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.before(index)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.after(index)

    def before(self, index: int) -> None: ...

    def inside(self, index: int) -> None: ...

    def after(self, index: int) -> None: ...

    def penalty(self) -> Tensor | float:
        return 0.0

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.student.parameters(), lr=0.05, eps=1e-3)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(2 * STEPS)
    ]
    rank = torch.distributed.get_rank()
    return DataLoader(batches[rank::2], batch_size=None)


def strategy_of(name: str) -> Any:
    """``ddp``, ``fsdp`` or a stage, with ``3 persistent`` for parameters that stay gathered."""
    if name == "ddp":
        from lightning.pytorch.strategies import DDPStrategy

        return DDPStrategy(process_group_backend="gloo", find_unused_parameters=False)
    if name == "fsdp":
        return zp.ZeroPlusFSDPStrategy()
    if name == "3 persistent":
        return zp.ZeroPlusStrategy(stage=3)
    return zero_plus(int(name))


def fit(strategy: str, loop: str | Program, precision: str = "32-true", **kwargs: Any) -> Program:
    """Fit on this rank."""
    module = loop if isinstance(loop, Program) else LOOPS[loop]()
    run = trainer(strategy_of(strategy), max_epochs=1, use_distributed_sampler=False, precision=precision, **kwargs)
    run.fit(module, data())
    return module


def state(module: nn.Module) -> dict[str, Tensor]:
    """The whole state, in fp32."""
    with zp.gathered(module):
        return {name: _whole(value).float().clone() for name, value in module.state_dict().items()}


def _whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def run(strategy: str, loop: str, precision: str = "32-true") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a fit leaves: the state, and what the loop has noted."""
    module = fit(strategy, loop, precision)
    return state(module), module.seen


def outcome(strategy: str, loop: str) -> str:
    """The exception that a fit raises, or nothing."""
    try:
        fit(strategy, loop)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def in_gathered(function: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    def within(self: Any, index: int) -> None:
        with zp.gathered(self):
            function(self, index)

    return within
