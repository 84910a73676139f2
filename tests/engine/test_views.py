"""Stage 3: graphs that keep views of a weight share one memory of it, which the weight has whenever it is used."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.strategy.test_fabric import fabric


class _Transposed(nn.Linear):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.addresses: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.addresses.append(self.weight.untyped_storage().data_ptr())
        return x @ self.weight.t() + self.bias


class _Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = _Transposed(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


def _run(leaf: bool) -> tuple[list[bool], float]:
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    run = fabric(zp.ZeroPlusFabricStrategy(3, config=config))
    torch.manual_seed(0)
    net = _Inside()
    whole = net.linear.weight.detach().clone()
    if leaf:
        set_z3_leaf_modules(net, [_Inside])
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    x = torch.ones(2, 4, requires_grad=True)
    outputs = [model(x), model(2 * x)]
    net.linear.weight.data.mul_(3)
    outputs.append(model(x))
    (grad,) = torch.autograd.grad(torch.stack(outputs).sum(), x)
    pickle.dumps(net)
    optimizer.zero_grad()
    first, *others = net.linear.addresses
    return [other == first for other in others], float((grad - 4 * 3 * whole.sum(0)).abs().max())


@pytest.mark.parametrize("leaf", [False, True])
def test_graphs_share_one_memory(ranks2: Any, leaf: bool) -> None:
    for shared, error in ranks2.run(_run, leaf):
        assert shared == [True, True]
        assert error < 1e-5
