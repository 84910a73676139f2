"""Elementwise optimizers step this rank's shards: the bits of a step of the DTensors, with fewer calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from lightning_zeroplus.fsdp.local_steps import on_shards

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.1),
    "Adam": lambda params: torch.optim.Adam(params, amsgrad=True),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.9),
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
}
SHAPES = ((5, 3), (1, 4), (6,))  # one rank has nothing of the second


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _trained(name: str, context: Callable[[Optimizer], Any]) -> tuple[list[Tensor], list[dict[str, Any]], list[str]]:
    """After four steps, of which one lacks a gradient: the weights, the states, and the types of the states."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    torch.manual_seed(0)
    params = [nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)])) for shape in SHAPES]
    optimizer = OPTIMIZERS[name](params)
    for step in range(4):
        for param in params:
            param.grad = distribute_tensor(torch.randn(param.shape), mesh, [Shard(0)])
        if step == 1:
            params[0].grad = None
        with context(optimizer):
            optimizer.step()
        assert [param for group in optimizer.param_groups for param in group["params"]] == params
    states = [{key: _whole(value) for key, value in optimizer.state[param].items()} for param in params]
    types = [type(value).__name__ for param in params for _, value in sorted(optimizer.state[param].items())]
    return [param.full_tensor().detach() for param in params], states, types


def _compared(name: str) -> None:
    want, states, types = _trained(name, lambda _: nullcontext())
    got, own_states, own_types = _trained(name, on_shards)
    assert all(map(torch.equal, got, want))
    assert own_types == types
    for mine, other in zip(own_states, states, strict=True):
        assert list(mine) == list(other)
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(other[key])) for key in other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_has_the_bits_of_a_step_of_dtensors(ranks2: Any, name: str) -> None:
    ranks2.run(_compared, name)


def _seen(changed: str) -> list[str]:
    """The types of the parameters that the step sees."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    param = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([param], 0.1)
    grad = distribute_tensor(torch.ones(4, 2), mesh, [Shard(int(changed == "another cut"))])
    param.grad = grad
    if changed == "a user's hook":
        for hook in (print, print):
            optimizer.register_step_post_hook(hook)
    version = param._version
    with on_shards(optimizer):
        seen = [type(each).__name__ for each in optimizer.param_groups[0]["params"]]
    assert optimizer.param_groups[0]["params"][0] is param
    assert changed != "nothing" or param._version > version  # a graph that has saved it would notice
    return seen


@pytest.mark.parametrize(
    ("changed", "seen"), [("nothing", "Tensor"), ("a user's hook", "DTensor"), ("another cut", "DTensor")]
)
def test_only_plain_steps_see_shards(ranks2: Any, changed: str, seen: str) -> None:
    assert ranks2.run(_seen, changed) == [[seen]] * 2


def _failed() -> bool:
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    param = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([param], 0.1)
    with pytest.raises(ZeroDivisionError), on_shards(optimizer):
        _ = 1 / 0
    return optimizer.param_groups[0]["params"][0] is param


def test_a_step_that_raises_leaves_the_parameters(ranks2: Any) -> None:
    assert ranks2.run(_failed) == [True, True]
