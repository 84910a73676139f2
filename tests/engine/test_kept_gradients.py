"""Gradients that are kept as tensors, on real engines: loops that DDP does not have, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zeroplus as zp
from lightning_zeroplus.engine.families.replicated import BF16Accumulation
from tests.strategy.test_fabric import fabric

_STAGES = pytest.mark.parametrize(
    ("stage", "reduction"), [(0, "backward"), (1, "backward"), (2, "backward"), (2, "step"), (3, "backward")]
)


def _set_up(stage: int, reduction: str) -> tuple[Any, Any, Any]:
    run = fabric(zp.ZeroPlusFabricStrategy(stage, reduction=reduction))
    net = nn.Linear(3, 2, bias=False)
    return run, *run.setup(net, torch.optim.SGD(net.parameters(), 0.1))


def _loss(model: Any) -> Tensor:
    """Its gradient is 1 on the first rank, 2 on the second."""
    return model(torch.full((1, 3), dist.get_rank() + 1.0)).sum()


def _in_a_window(run: Any, model: Any) -> None:
    with run.strategy.coalesce():
        run.backward(_loss(model))
        run.backward(_loss(model))


def _in_no_sync(run: Any, model: Any) -> None:
    with run.no_backward_sync(model):
        run.backward(_loss(model))
    run.backward(_loss(model))


def _nested(run: Any, model: Any) -> None:
    leaf = torch.zeros((), requires_grad=True)

    def hook(grad: Tensor) -> None:
        with torch.enable_grad():
            run.backward(_loss(model))

    leaf.register_hook(hook)
    run.backward(leaf + _loss(model))


def _kept(stage: int, reduction: str, differentiate: Callable[[Any, Any], None]) -> list[float]:
    """What is kept after each backward, and what the steps have made of the weight, from 0."""
    run, model, optimizer = _set_up(stage, reduction)
    (weight,) = model.parameters()
    with zp.gathered(model), torch.no_grad():
        weight.zero_()
    run.backward(_loss(model))
    kept = weight.grad
    found = []
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        differentiate(run, model)
        found += kept.unique().tolist()
        assert weight.grad is kept
        kept.mul_(0.5)
        optimizer.step()
    with zp.gathered(model):
        return found + weight.detach().unique().tolist()


@_STAGES
@pytest.mark.parametrize("differentiate", [_in_a_window, _in_no_sync, _nested])
def test_a_kept_gradient_follows(ranks2: Any, stage: int, reduction: str, differentiate: Any) -> None:
    for found in ranks2.run(_kept, stage, reduction, differentiate):
        assert found == pytest.approx([3, 3, -0.3])


def _after_no_sync_alone(stage: int, reduction: str) -> list[float]:
    run, model, optimizer = _set_up(stage, reduction)
    run.backward(_loss(model))
    kept = model.weight.grad
    optimizer.zero_grad(set_to_none=False)
    with run.no_backward_sync(model):
        run.backward(_loss(model))
    optimizer.step()
    found = kept.unique().tolist()
    run.backward(_loss(model))
    return found + kept.unique().tolist()


@_STAGES
def test_a_step_after_no_sync_alone_shows_what_it_has_used(ranks2: Any, stage: int, reduction: str) -> None:
    for found in ranks2.run(_after_no_sync_alone, stage, reduction):
        assert found == pytest.approx([1.5, 3])


def _in_flat_fp32() -> list[float]:
    run = fabric(zp.ZeroPlusFabricStrategy(1, accumulate_dtype="float32"), "bf16-true")
    model, optimizer = run.setup(net := nn.Linear(3, 2, bias=False), torch.optim.SGD(net.parameters(), 0.1))
    accumulation: Any = model._forward_module.gradient_accumulation
    assert type(accumulation) is BF16Accumulation
    run.backward(_loss(model))
    kept = model.weight.grad
    run.backward(_loss(model))
    found = kept.unique().tolist()
    optimizer.zero_grad(set_to_none=False)
    kept.add_(1)
    run.backward(_loss(model))
    found += kept.unique().tolist()
    optimizer.zero_grad()
    run.backward(_loss(model))
    return found + kept.unique().tolist() + model.weight.grad.unique().tolist()


def test_a_kept_gradient_follows_where_upstream_keeps_all_in_one_tensor(ranks2: Any) -> None:
    for found in ranks2.run(_in_flat_fp32):
        assert found == [3, 2.5, 2.5, 1.5]  # what is kept of a gradient that is None stays


def _cost(stage: int, reduction: str, set_to_none: bool) -> list[tuple[int, int]]:
    """How often the ranks are asked, and gradients are gathered, in each step of a loop that keeps nothing."""
    run, model, optimizer = _set_up(stage, reduction)
    accumulation: Any = model._forward_module.gradient_accumulation
    counts = []
    for _ in range(3):
        with (
            patch.object(accumulation, "does_any_rank", wraps=accumulation.does_any_rank) as asked,
            patch.object(accumulation, "_whole", wraps=accumulation._whole) as gathered,
        ):
            run.backward(_loss(model))
            float(torch.stack([param.grad.norm() for param in model.parameters()]).norm())
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            counts.append((asked.call_count, gathered.call_count))
    return counts


@_STAGES
def test_a_loop_that_keeps_nothing_is_asked_only_if_it_zeroes_in_place(ranks2: Any, stage: int, reduction: str) -> None:
    assert ranks2.run(_cost, stage, reduction, True) == [[(0, 1)] * 3] * 2
    if stage > 0:
        assert ranks2.run(_cost, stage, reduction, False) == [[(0, 1), (1, 1), (1, 1)]] * 2
