"""``configure_model`` at stage 3: sharded from the start, with the weights that its code asks for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.support.training import Classifier, fit, relative_error, weights, zero_plus


class _Transformer(Classifier):
    """``nn.MultiheadAttention`` zeroes a bias of its child, which ``zero.Init`` has partitioned by then."""

    def build(self) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Unflatten(1, (4, 4)), layer, nn.Flatten(), nn.Linear(16, 4))
        # Not numel(): to ask for it would gather the parameter.
        self.partitioned = [_is_partitioned(parameter) for parameter in self.net.parameters()]


class _Reinitialized(nn.Module):
    """Everything that people do to parameters in constructors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 32)
        self.tied, self.last = nn.Linear(32, 32), nn.Linear(32, 4)
        self.tied.weight = self.second.weight
        nn.init.xavier_uniform_(self.first.weight)
        self.second.weight.data.normal_(0, 0.1)
        nn.init.zeros_(self.last.bias)
        with torch.no_grad():
            self.last.weight.mul_(0.5).clamp_(-0.1, 0.1)
            self.first.bias[:4] = 0.25
        for _, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.normal_(parameter, std=0.01 + self.first.weight.std().item())
        self.apply(_double_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        return self.last(torch.relu(self.tied(hidden)))


def _double_bias(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.bias.data.mul_(2)


class _Custom(Classifier):
    def build(self) -> None:
        torch.manual_seed(0)
        self.net = _Reinitialized()  # type: ignore[assignment]
        self.partitioned = [True]


def _is_partitioned(parameter: Any) -> bool:
    status = getattr(parameter, "ds_status", None)
    return status is not None and status.name == "NOT_AVAILABLE"


def _initial_weights(module: type[Classifier], keep: int) -> tuple[float, float, list[bool]]:
    errors = []
    with patch("lightning_zeroplus.engine.upstream.sharded_init._KEEP_ELEMENTS", keep):
        for limit in ({"limit_train_batches": 0, "limit_val_batches": 0}, {}):
            want = weights(fit("ddp", module(sharded_init=True), **limit))
            sharded = fit(zero_plus(3), module(sharded_init=True), **limit)
            errors.append(relative_error(weights(sharded), want))
    return errors[0], errors[1], sharded.partitioned  # type: ignore[attr-defined]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("keep", [1000, 1], ids=["all_gathered", "one_gathered"])
def test_attention_initializes_its_child(ranks2: Any, keep: int) -> None:
    for initial, trained, partitioned in ranks2.run(_initial_weights, _Transformer, keep):
        assert initial == 0
        assert trained <= 1e-6
        assert all(partitioned[:2]), "the model must be sharded while it is built"


def _initial_weights_upstream() -> float:
    with (
        patch("lightning_zeroplus.engine.upstream.sharded_init.InitThroughPartitions", nullcontext),
        # What watches the module of an earlier fit that has failed, and is still alive.
        patch("lightning_zeroplus.weights.partitioned.initializers.is_partitioned", lambda param: False),
    ):
        return _initial_weights(_Transformer, 1)[0]


def test_upstream_loses_the_initialization(ranks2: Any) -> None:
    assert min(ranks2.run(_initial_weights_upstream)) > 0.01


def test_constructors_write_through_partitions(ranks2: Any) -> None:
    for initial, trained, _ in ranks2.run(_initial_weights, _Custom, 10_000):
        assert initial == 0
        assert trained <= 1e-6
