"""The store under ZeroPlusStrategy: deferred gradients enter the engine's accumulation like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_zeroplus.weight_grads.convert import defer_weight_grads
from lightning_zeroplus.weight_grads.store import WeightGradStore
from tests.matrix.cells import pretend_fp16_kernels
from tests.support.training import ManualClassifier, fit, relative_error, weights, zero_plus

BOUND = 1e-6


class Plain(ManualClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            self.manual_backward(self.loss((x, y)))
        self.optimizers().step()
        self.optimizers().zero_grad()


class Deferring(ManualClassifier):
    """One flush for both backwards, before the step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.store = WeightGradStore()
        assert defer_weight_grads(self, store=self.store) == ["net.0", "net.2"]
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for layer in (self.net[0], self.net[2]):
            layer.weight.register_hook(lambda grad: self.dtypes.add(grad.dtype))
        with self.store.defer():
            for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
                self.manual_backward(self.loss((x, y)))
        assert len(self.store) == 4
        self.store.flush()
        self.optimizers().step()
        self.optimizers().zero_grad()


def _error(stage: int, reduction: str) -> float:
    want = weights(fit("ddp", Plain()))
    return relative_error(weights(fit(zero_plus(stage, reduction=reduction), Deferring())), want)


@pytest.mark.sampled
@pytest.mark.parametrize("reduction", ["backward", "step"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deferring_trains_as_ddp(ranks2: Any, stage: int, reduction: str) -> None:
    assert max(ranks2.run(_error, stage, reduction)) <= BOUND


class DeferringInTurns(Deferring):
    """Backwards with and without a loss scale leave weight gradients, which are computed in or after the other kind."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second, third = zip(batch[0].half().chunk(3), batch[1].chunk(3), strict=True)
        with self.store.defer():
            self.loss(first).backward()
            self.store.max_bytes = 1  # computes what waits in the next backward
            self.manual_backward(self.loss(second))
            self.store.max_bytes = None
            self.manual_backward(self.loss(second))
            self.loss(third).backward()
        assert len(self.store) == 4
        self.store.flush()
        self.optimizers().step()
        self.optimizers().zero_grad()


class InTurns(ManualClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second, third = zip(batch[0].chunk(3), batch[1].chunk(3), strict=True)
        for each in (first, second, second, third):
            self.manual_backward(self.loss(each))
        self.optimizers().step()
        self.optimizers().zero_grad()


def _error_in_fp16(stage: int) -> float:
    pretend_fp16_kernels()
    want = weights(fit("ddp", InTurns()))
    strategy = zero_plus(stage, {"fp16": {"loss_scale": 128}})
    return relative_error(weights(fit(strategy, DeferringInTurns(), precision="16-true")), want)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deferred_gradients_have_one_loss_scale(ranks2: Any, stage: int) -> None:
    assert max(ranks2.run(_error_in_fp16, stage)) <= 2e-3


def _dtypes(stage: int) -> set[torch.dtype]:
    module = Deferring()
    fit(zero_plus(stage, accumulate_dtype=torch.float32), module, precision="bf16-true", max_steps=2)
    return module.dtypes


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_enter_with_the_expected_dtype(ranks2: Any, stage: int) -> None:
    assert ranks2.run(_dtypes, stage) == [{torch.float32}] * 2
