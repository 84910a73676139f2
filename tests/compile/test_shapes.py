"""Batches whose shapes differ between the ranks: they compile at different times, and wait for each other nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zeroplus.engine.compile import session
from tests.training import Classifier, fit, weights, zero_plus


class _Net(nn.Module):
    """One graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class _Ragged(Classifier):
    """Rank 1 gets fewer samples from its second batch on, in three sizes."""

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = _Net()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        samples = 16 - 3 * (batch_idx % 4) * self.global_rank
        return self.loss((batch[0][:samples], batch[1][:samples]))


def _train(stage: int | None) -> tuple[Tensor, int]:
    """The weights, and how many graphs were compiled."""
    compiled = 0
    alone = session.alone

    def counted() -> Any:
        nonlocal compiled
        compiled += 1
        return alone()

    session.alone = counted
    try:
        strategy: Any = "ddp" if stage is None else zero_plus(stage, compile={"backend": "eager"})
        return weights(fit(strategy, _Ragged(scheduler=None), max_epochs=1)), compiled
    finally:
        session.alone = alone


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_compile_at_different_times(ranks2: Any, stage: int) -> None:
    ours, ddp = ranks2.run(_train, stage), ranks2.run(_train, None)
    for (compiled, _), (expected, _) in zip(ours, ddp, strict=True):
        torch.testing.assert_close(compiled, expected, rtol=0, atol=1e-6)
    assert 0 < ours[0][1] < ours[1][1]
