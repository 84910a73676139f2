"""Gradients that are no numbers, on one rank only: all ranks do the same, and what DDP does where it has an answer."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Subset

import lightning_zeroplus as zp
from tests.matrix.cells import pretend_fp16_kernels
from tests.support.training import Classifier, loader, trainer, weights, zero_plus

_BAD_STEP = 2
_GLOBAL_BATCH = 32


class _Bad(Classifier):
    """In one step, the gradients of one rank are ``value``."""

    def __init__(self, value: float) -> None:
        super().__init__(scheduler=None)
        self.value = value
        self.after: list[Tensor] = []
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return loss * self.value if batch_idx == _BAD_STEP and self.global_rank == 1 else loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.after.append(weights(self))
        optimizer = getattr(self.trainer.strategy.model, "optimizer", None)
        self.scales.append(float(getattr(optimizer, "loss_scale", 1.0)))


class Trained(NamedTuple):
    """Of one rank, after every batch."""

    weights: list[Tensor]
    scales: list[float]


def _train(stage: int | None, value: float, precision: Any, without_the_batch: bool = False) -> Trained:
    if precision == "16-true":
        pretend_fp16_kernels()
    module = _Bad(value)
    strategy: Any = "ddp" if stage is None else zero_plus(stage)
    if precision == "16-true":
        zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100}
        fp16 = {"initial_scale_power": 4, "hysteresis": 1}
        strategy = zp.ZeroPlusStrategy(stage=stage, config={"zero_optimization": zero, "fp16": fp16})
    data = loader(5 * _GLOBAL_BATCH)
    left_out = range(_BAD_STEP * _GLOBAL_BATCH, (_BAD_STEP + 1) * _GLOBAL_BATCH) if without_the_batch else range(0)
    samples = Subset(data.dataset, [index for index in range(5 * _GLOBAL_BATCH) if index not in left_out])
    # Each rank takes every second sample of a global batch.
    sampled = DataLoader(samples, _GLOBAL_BATCH // 2, sampler=DistributedSampler(samples, shuffle=False))
    trainer(strategy, precision=precision, max_epochs=1, use_distributed_sampler=False).fit(module, sampled, loader(32))
    return Trained(module.after, module.scales)


@pytest.mark.sampled
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_all_ranks_skip_the_step_in_which_one_overflows(ranks2: Any, stage: int, value: float) -> None:
    first, second = ranks2.run(_train, stage, value, "16-true")
    assert first.scales == second.scales == [16, 16, 8, 8, 8]
    for mine, theirs in zip(first.weights, second.weights, strict=True):
        assert mine.isfinite().all() and torch.equal(mine, theirs)
    assert torch.equal(first.weights[_BAD_STEP], first.weights[_BAD_STEP - 1])
    assert not torch.equal(first.weights[_BAD_STEP + 1], first.weights[_BAD_STEP])
    # The step is left out and nothing else: as if its batch had not been there. The scales are powers of two.
    without = ranks2.run(_train, stage, 1.0, "16-true", True)[0]
    assert torch.equal(first.weights[-1], without.weights[-1])


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_a_loss_scale_all_ranks_update_as_ddp_does(ranks2: Any, stage: int, precision: str) -> None:
    """Upstream skips such a step at most stages."""
    for mine, theirs in zip(
        *(each.weights for each in ranks2.run(_train, stage, float("nan"), precision)), strict=True
    ):
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))
    mine, ddp = (ranks2.run(_train, each, float("nan"), precision)[0].weights for each in (stage, None))
    assert mine[_BAD_STEP - 1].isfinite().all() and ddp[_BAD_STEP - 1].isfinite().all()
    assert mine[_BAD_STEP].isnan().all() and ddp[_BAD_STEP].isnan().all()
