"""A long training on the ranks of a pool: how much memory it gains, and how far it is from the reference."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zeroplus.testing import train_reference
from tests.conftest import quiet
from tests.support.training import ManualClassifier, relative_error, trainer, weights, zero_plus

#: Every so many steps the batches repeat.
_BATCHES = 64


class Outcome(NamedTuple):
    """Of one rank.

    Attributes:
        steps: Optimizer steps.
        growth: Growth of the resident set from a tenth of the steps on, relative.
        error: L2 distance of the weights from the reference's, relative.
    """

    steps: int
    growth: float
    error: float


def batch(index: int, rank: int) -> tuple[Tensor, Tensor]:
    """What ``rank`` trains on in step ``index``."""
    generator = torch.Generator().manual_seed(2 * (index % _BATCHES) + rank)
    return torch.randn(12, 8, generator=generator), torch.randint(4, (12,), generator=generator)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.01, momentum=0.9, weight_decay=0.05)


class _Batches(IterableDataset[Any]):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Any]:
        return (batch(index, dist.get_rank()) for index in range(self.steps))


class Soaked(ManualClassifier):
    """Two backwards in a window and a plain one in every step.

    The net is smooth, and its weights decay: a difference of 1e-7 is 3e-7 after 2,000 steps, and 6e-3 with ReLU.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.resident = [0, 0]

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        parts = [*zip(batch[0].chunk(3), batch[1].chunk(3), strict=True)]
        with self.trainer.strategy.coalesce():
            for part in parts[:2]:
                self.manual_backward(self.loss(part))
        self.manual_backward(self.loss(parts[2]))
        optimizer.step()
        optimizer.zero_grad()
        if batch_idx + 1 in (self.steps // 10, self.steps):
            gc.collect()
            self.resident[batch_idx + 1 == self.steps] = psutil.Process().memory_info().rss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _sgd(self.parameters())


def soak(stage: int, steps: int, compiled: bool = False) -> Outcome:
    """Train on this rank, and compare."""
    quiet()
    module = Soaked(steps)
    strategy = zero_plus(stage, compile={"backend": "eager"} if compiled else False)
    run = trainer(strategy, max_epochs=1, limit_val_batches=0, use_distributed_sampler=False)
    run.fit(module, DataLoader(_Batches(steps), batch_size=None))
    before, after = module.resident
    return Outcome(run.global_step, after / before - 1, relative_error(weights(module), _reference(steps)))


def _reference(steps: int) -> Tensor:
    def pattern(net: nn.Module, batch: Any, backward: Any, index: int) -> None:
        for x, y in zip(batch[0].chunk(3), batch[1].chunk(3), strict=True):
            backward(nn.functional.cross_entropy(net(x), y))

    result = train_reference(
        Soaked(steps).net,
        _sgd,
        pattern,
        ([batch(index, rank) for rank in range(2)] for index in range(steps)),
    )
    return torch.cat([param.flatten() for param in result.params[-1]])
