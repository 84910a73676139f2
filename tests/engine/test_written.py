"""Stage 3: before a step, the partitions get what a user has written to weights that stay gathered, and only that."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import lightning_zeroplus as zp
from lightning_zeroplus.weights.partitioned import partition
from tests.strategy.test_fabric import fabric


def _copied() -> list[int]:
    """The weights that each step copies to their partitions. One is written before the third step."""
    run = fabric(zp.ZeroPlusFabricStrategy(3))
    net = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    copied = 0
    upstream = partition.own_slice

    def own_slice(*args: Any) -> Any:
        nonlocal copied
        copied += 1
        return upstream(*args)

    found = []
    with patch.object(partition, "own_slice", own_slice):
        for index in range(5):
            run.backward(model(torch.ones(2, 4)).square().sum())
            if index == 2:
                with torch.no_grad():
                    net[2].bias.add_(1.0)
            before = copied
            optimizer.step()
            optimizer.zero_grad()
            found.append(copied - before)
    return found


def test_a_step_copies_only_what_was_written(ranks2: Any) -> None:
    assert ranks2.run(_copied) == [[0, 0, 1, 0, 0]] * 2
