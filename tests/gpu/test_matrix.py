"""The gradient matrix on real GPUs with NCCL: the same cells, references and bounds as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_zeroplus.testing import RankPool
from tests.matrix.cells import run_cell
from tests.matrix.test_gradient_matrix import CELLS, check
from tests.support.turns import turn

_EVERY = 10


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.every_cell] * bool(turn(name) % _EVERY)) for name in CELLS]
)
def test_cell_on_a_gpu(gpu_ranks: RankPool, name: str) -> None:
    outcomes: list[Any] = gpu_ranks.run(run_cell, CELLS[name])
    check(CELLS[name], outcomes)
