"""``reduction="auto"`` on the CPU: gradients wait for the step if a few buckets hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zeroplus.engine.build import build_engine
from lightning_zeroplus.gradients.ranks import gloo

_SMALL: Mapping[str, Any] = {"stage3_param_persistence_threshold": 40}


def _run(stage: int, reduction: Any, zero: Mapping[str, Any]) -> tuple[str, int]:
    """When an engine reduces, and how often in the third step of three backwards."""
    deepspeed.init_distributed(verbose=False)
    net = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine = build_engine(net, torch.optim.SGD(net.parameters(), 0.1), config, reduction=reduction)
    for step in range(3):
        with patch.object(gloo.reduction, "_exchanged", wraps=gloo.reduction._exchanged) as exchanged:
            for index in range(3):
                generator = torch.Generator().manual_seed(6 * step + 2 * index + dist.get_rank())
                engine.backward(engine(torch.randn(4, 8, generator=generator)).square().mean())
            engine.step()
            engine.optimizer.zero_grad()
    assert engine.gradient_accumulation is not None
    found = engine.gradient_accumulation.reduction
    engine.destroy()
    return found, exchanged.call_count


@pytest.mark.parametrize(
    ("stage", "reduction", "zero", "expected"),
    [
        (0, "auto", {}, ("step", 0)),  # an all-reduce
        (1, "auto", {}, ("step", 1)),
        (2, "auto", {}, ("step", 1)),
        (2, "auto", {"reduce_bucket_size": 19}, ("step", 4)),  # all parameters have 76 elements
        (2, "auto", {"reduce_bucket_size": 18}, ("backward", 12)),
        (2, "auto", {"overlap_comm": True}, ("backward", 0)),  # upstream's all-reduce
        (2, "auto", {"offload_optimizer": {"device": "cpu"}}, ("backward", 0)),
        (2, "backward", {}, ("backward", 3)),
        (3, "auto", _SMALL, ("step", 1)),
        (3, "backward", _SMALL, ("backward", 3)),
        (3, "auto", {"stage3_param_persistence_threshold": 0}, ("step", 1)),
        (3, "auto", {**_SMALL, "reduce_bucket_size": 18}, ("backward", 12)),
        (3, "auto", {**_SMALL, "offload_optimizer": {"device": "cpu"}}, ("backward", 3)),
    ],
)
def test_when_gradients_are_reduced(
    ranks2: Any, stage: int, reduction: str, zero: Mapping[str, Any], expected: tuple[str, int]
) -> None:
    assert ranks2.run(_run, stage, reduction, zero) == [expected] * 2
