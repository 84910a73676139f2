"""Stage 3: once the order of the modules is known, a weight that is soon needed again is gathered once per step."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zeroplus.engine.build import build_engine
from lightning_zeroplus.engine.gathering.gathers import _GathersAsNeeded


class _Tied(nn.Module):
    """Reads another module's weight, by its attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale(self.embed(inputs)) @ self.embed.weight


def _attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def _gathered(kind: Any) -> list[int]:
    """How often each weight was gathered in the last of four steps."""
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    net = nn.Sequential(kind(), kind())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    engine = build_engine(net, torch.optim.SGD(net.parameters(), 0.1), config)
    times: Counter[int] = Counter()
    upstream = _GathersAsNeeded.gather

    def gather(self: Any, params: Any, forward: bool) -> None:
        times.update(param.ds_id for param in params if param.ds_status.name == "NOT_AVAILABLE")
        upstream(self, params, forward)

    with patch.object(_GathersAsNeeded, "gather", gather):
        for step in range(4):
            times.clear()
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            engine.backward(engine(torch.randn(4, 3, 8, generator=generator)).square().mean())
            engine.step()
            engine.optimizer.zero_grad()
    counts = [times[param.ds_id] for param in net.parameters()]  # type: ignore[attr-defined]
    engine.destroy()
    return counts


@pytest.mark.parametrize("kind", [_linear, _attention, _Tied])
def test_each_weight_is_gathered_once(ranks2: Any, kind: Any) -> None:
    for counts in ranks2.run(_gathered, kind):
        assert counts == [1] * len(counts)
