"""Stage 3 on gloo: a step brings what stays whole to all ranks, into the memory that it has."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters
from torch import Tensor, nn

from lightning_zeroplus.engine.build import build_engine
from lightning_zeroplus.engine.gathering import on_gloo
from lightning_zeroplus.testing.ranks import RankError
from tests.engine.test_all_whole import _CONFIG

STEPS = 3


class Net(nn.Module):
    """Weights of one element, of less than the ranks have, of as many and of more; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).tanh() * self.scale).add(self.frozen).square().mean()


def _inputs(step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step))


def _engine(net: nn.Module, optimizer: Any = None) -> Any:
    deepspeed.init_distributed(verbose=False)
    return build_engine(net, optimizer or torch.optim.SGD(net.parameters(), 0.1), _CONFIG)


def _alone() -> list[Tensor]:
    net = Net()
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(STEPS):
        net(_inputs(step)).backward()
        sgd.step()
        sgd.zero_grad()
    return [param.detach() for param in net.parameters()]


def _trained(released_on: int | None, large: int, together: int) -> tuple[list[Tensor], bool, bool]:
    """The weights; whether a copy that shares memory has the values; whether the memory stayed, step by step.

    Args:
        released_on: The rank that releases its weights before each step; None: none.
        large: Elements of a weight that is gathered alone.
        together: Elements that are gathered together.
    """
    net = Net()
    with patch.object(on_gloo, "_LARGE", large), patch.object(on_gloo, "_TOGETHER", together):
        engine = _engine(net)
    stayed, held = [], None
    for step in range(STEPS):
        engine.backward(engine(_inputs(step)))
        if step == 1:
            held = net.first.weight.data
        before = [param.data_ptr() for param in net.parameters()]
        if dist.get_rank() == released_on:
            engine.optimizer.parameter_offload.empty_partition_cache()
        engine.step()
        engine.optimizer.zero_grad()
        stayed.append(before == [param.data_ptr() for param in net.parameters()])
    params = list(net.parameters())
    with partition_parameters.GatheredParameters(params):
        whole = [param.detach().clone() for param in params]
    follows = held is not None and torch.equal(held, whole[[id(param) for param in params].index(id(net.first.weight))])
    engine.destroy()
    return whole, follows, all(stayed[1:])


@pytest.mark.parametrize("released_on", [None, 0, 1])
@pytest.mark.parametrize(("large", "together"), [(100, 100), (4, 100), (100, 40), (1, 1)])
def test_all_ranks_get_the_weights(ranks: Any, released_on: int | None, large: int, together: int) -> None:
    for number in (2, 3):
        for rank, (whole, follows, stayed) in enumerate(ranks(number).run(_trained, released_on, large, together)):
            for found, wanted in zip(whole, _alone(), strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)  # fp32, averaged over equal ranks
            assert follows
            assert stayed == (rank != released_on)


class _Failing(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.fails:
            raise KeyError("in the step, after some weights")
        return result


def _after_failure() -> tuple[list[Tensor], list[Tensor]]:
    """The weights before a step that raises after its update, and in the forward after it."""
    net = Net()
    optimizer = _Failing(net.parameters(), 0.1)
    engine = _engine(net, optimizer)
    for step in range(2):
        engine.backward(engine(_inputs(step)))
        optimizer.fails = step == 1
        before = [param.detach().clone() for param in net.parameters()]
        if step:
            with pytest.raises(KeyError):
                engine.step()
        else:
            engine.step()
            engine.optimizer.zero_grad()
    seen: list[Tensor] = []
    handle = net.second.register_forward_hook(lambda *_: seen.extend(p.detach().clone() for p in net.parameters()))
    engine(_inputs(2))
    handle.remove()
    engine.destroy()
    return before, seen


def test_after_a_step_that_raises_all_ranks_have_what_it_has_updated(ranks2: Any) -> None:
    (before, first), (_, second) = ranks2.run(_after_failure)
    assert all(map(torch.equal, first, second))
    # Of the frozen weight nothing is updated.
    assert sorted(map(torch.equal, before, first)) == [False] * (len(before) - 1) + [True]


def _steps_with_statistics() -> None:
    net = Net()
    engine = _engine(net)
    with patch.object(type(get_accelerator()), "memory_stats", side_effect=KeyError("read")):
        engine.backward(engine(_inputs(0)))
        engine.step()
        with pytest.raises(KeyError):
            get_accelerator().memory_stats()
    engine.destroy()


def test_a_step_asks_for_no_statistics(ranks2: Any) -> None:
    try:
        ranks2.run(_steps_with_statistics)
    except RankError as error:
        pytest.fail(str(error))
