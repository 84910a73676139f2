"""GradientNorms: arguments, refusals, its one reduction. Programs of the family ``norms`` show its values."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from lightning_zeroplus.callbacks import gradient_norms
from tests.docs.small import Small, fit
from tests.support.training import trainer, zero_plus


@pytest.mark.parametrize("patterns", [[], [1], None, {"a": 1}])
def test_refuses_what_are_no_patterns(patterns: Any) -> None:
    with pytest.raises(ValueError, match=r"zp.GradientNorms\(patterns=.*give a pattern of names"):
        zp.GradientNorms(patterns)


def test_patterns_match_parameters_and_modules() -> None:
    def matches(pattern: str) -> bool:
        return gradient_norms._matches("net.layers.10.weight", pattern)

    assert all(map(matches, ("*", "net", "net.layers", "net.layers.1?", "*.weight", "net.layers.10.weight")))
    assert not any(map(matches, ("layers", "net.layers.1", "*.bias", "ne", "")))


def _without_a_match() -> str:
    with pytest.raises(MisconfigurationException) as caught:
        fit(Small(), zero_plus(1), callbacks=[zp.GradientNorms(["*", "encoder"])])
    return str(caught.value)


def test_refuses_a_pattern_without_a_match(ranks2: Any) -> None:
    for message in ranks2.run(_without_a_match):
        assert "'encoder' matches no trainable parameter, nor a module with one. Names are 'net." in message


class _OneStep(LightningModule):
    """A step whose gradient is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def training_step(self, batch: Tensor) -> Tensor:
        return (self.weight * batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize(
    ("grad", "is_finite"),
    [
        ([1.0, 2.0, 3.0], True),
        ([3e38, 3e38, 0.0], True),
        ([torch.inf, -torch.inf, 0.0], False),
        ([0.0, torch.nan, 0.0], False),
    ],
)
def test_only_what_is_not_finite_is_named(grad: list[float], is_finite: bool) -> None:
    norms = zp.GradientNorms()
    run = trainer("auto", devices=1, max_epochs=1, callbacks=[norms], log_every_n_steps=1)
    with nullcontext() if is_finite else pytest.warns(UserWarning, match="'weight' on rank 0, in backward 1 of step 0"):
        run.fit(_OneStep(), DataLoader(torch.tensor([grad]), batch_size=None))
    assert norms.not_finite == ([] if is_finite else [gradient_norms.NotFinite(0, 1, 0, "weight")])


class _Counting:
    """``torch.distributed`` for the callback alone."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: Any) -> Any:
        self.sizes.append(tensor.numel())
        return dist.all_reduce(tensor)


def _reductions(stage: int) -> tuple[list[int], int]:
    counting = _Counting()
    norms = zp.GradientNorms(["*", "*.bias", "net"])
    run = trainer(zero_plus(stage), max_epochs=2, use_distributed_sampler=False, callbacks=[norms], log_every_n_steps=2)
    with patch.object(gradient_norms, "dist", counting):
        run.fit(Small())
    assert norms.norms.keys() == {"*", "*.bias", "net"} and not norms.not_finite
    return counting.sizes, run.global_step


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_logged_step_reduces_one_vector(ranks2: Any, stage: int) -> None:
    for sizes, steps in ranks2.run(_reductions, stage):
        assert steps >= 2 and sizes == [5] * (steps // 2), "three patterns, all, and what is not finite"
