"""The gradient reference, checked against arithmetic done by hand and against DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zeroplus.testing import train_reference
from tests.matrix.cells import Cell, run_cell
from tests.matrix.test_gradient_matrix import check


def _linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    module = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(1.0)
    return module.to(dtype)


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def _times(module: nn.Module, batch: float, backward: Any, index: int) -> None:
    x = torch.tensor([[batch]], dtype=next(module.parameters()).dtype)
    backward(module(x).sum())
    backward(module(2 * x).sum())


def test_by_hand() -> None:
    """Two ranks, two backwards each: the gradient of step k is the mean over ranks of ``x + 2 x``."""
    reference = train_reference(_linear(), _sgd, _times, [(1.0, 3.0), (5.0, 7.0)])
    assert reference.norms == [6.0, 18.0]
    assert [float(params[0]) for params in reference.params] == [1 - 6, 1 - 6 - 18]


def test_several_batches_per_step_and_clipping() -> None:
    reference = train_reference(
        _linear(),
        _sgd,
        _times,
        [(1.0, 3.0), (5.0, 7.0)],
        steps_at=lambda index: index == 1,
        clip=lambda params: torch.nn.utils.clip_grad_value_(params, 2.0),
    )
    assert reference.norms == [24.0]
    assert [float(params[0]) for params in reference.params] == [1 - 2]


def test_low_precision_gradients_are_summed_and_applied_in_fp32() -> None:
    """In bf16 neither 256 + 1 nor 1 - 2**-9 exists."""

    def pattern(module: nn.Module, batch: float, backward: Any, index: int) -> None:
        for value in (256.0, 1.0):
            backward(module(torch.tensor([[value * batch]], dtype=torch.bfloat16)).sum())

    reference = train_reference(_linear(torch.bfloat16), _sgd, pattern, [(2.0**-9,)])
    assert float(reference.params[0][0]) == 1 - 257 * 2.0**-9


def test_parameters_without_gradient_stay() -> None:
    module = nn.ModuleList([_linear(), _linear()])

    def pattern(module: Any, batch: float, backward: Any, index: int) -> None:
        _times(module[0], batch, backward, index)

    reference = train_reference(module, _sgd, pattern, [(1.0,)])
    assert [float(param) for param in reference.params[0]] == [1 - 3, 1]


@pytest.mark.parametrize("pattern", ["single", "several", "tied", "cached"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_ddp_agrees(ranks2: Any, pattern: str, optimizer: str) -> None:
    """Where DDP can run the loop, it must give what the reference says: it shows the reference right, not us."""
    check(Cell(0, pattern, optimizer=optimizer), ranks2.run(run_cell, Cell(0, pattern, optimizer=optimizer), _ddp))


def _ddp(cell: Cell) -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    return DDPStrategy(find_unused_parameters=True)
