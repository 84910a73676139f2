"""Gradients that a step has used: kept until they are zeroed, and not kept by loops that zero them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import lightning_zeroplus as zp
from tests.strategy.test_fabric import fabric

_STAGES = pytest.mark.parametrize(("stage", "offload"), [(0, None), (1, None), (2, "cpu"), (3, None), (3, "cpu")])


def _set_up(stage: int, offload: Any, parameters: int = 1) -> tuple[Any, ...]:
    run = fabric(zp.ZeroPlusFabricStrategy(stage, offload=offload))
    net = nn.Linear(3, 2, bias=parameters == 2)
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    return run, model, optimizer, model._forward_module.gradient_accumulation


def _ordinary(stage: int, offload: Any) -> list[tuple[int, int]]:
    """How many gradients are kept after each step, and after ``zero_grad()``."""
    run, model, optimizer, accumulation = _set_up(stage, offload, parameters=2)
    counts = []
    for _ in range(3):
        run.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        after_step = len(accumulation.kept)
        optimizer.zero_grad()
        counts.append((after_step, len(accumulation.kept)))
        assert not accumulation._read_by_step
    return counts


@_STAGES
def test_a_loop_that_zeroes_keeps_only_the_first(ranks2: Any, stage: int, offload: Any) -> None:
    later = (2, 0) if stage == 0 else (0, 0)  # at stage 0 every rank has all gradients, and keeps them as DDP does
    assert ranks2.run(_ordinary, stage, offload) == [[(2, 0), later, later]] * 2


def _released(stage: int, offload: Any) -> str:
    """What is said of a gradient that was not kept."""
    run, model, optimizer, _ = _set_up(stage, offload)
    for _ in range(2):
        optimizer.zero_grad()
        run.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
    (weight,) = model.parameters()
    try:
        return str(weight.grad)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(("stage", "offload"), [(1, None), (2, "cpu"), (3, None), (3, "cpu")])
def test_a_gradient_that_was_released_is_not_shown(ranks2: Any, stage: int, offload: Any) -> None:
    for said in ranks2.run(_released, stage, offload):
        assert re.search("zeroed unread. Read it before the step", said)


def _read(stage: int, offload: Any) -> list[float]:
    """A loop that reads its gradients after each step: they are kept, although it zeroes them."""
    run, model, optimizer, _ = _set_up(stage, offload)
    (weight,) = model.parameters()
    seen = []
    for factor in (1.0, 2.0, 4.0):
        run.backward(factor * model(torch.ones(1, 3)).sum())
        optimizer.step()
        seen.append(float(weight.grad.sum()))
        optimizer.zero_grad()
    return seen


@_STAGES
def test_a_loop_that_reads_keeps_all(ranks2: Any, stage: int, offload: Any) -> None:
    assert ranks2.run(_read, stage, offload) == [[6.0, 12.0, 24.0]] * 2
