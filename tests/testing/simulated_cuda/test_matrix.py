"""The gradient matrix on the simulated device: the same cells, references and bounds as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_zeroplus.testing import RankPool
from tests.matrix.cells import run_cell
from tests.matrix.test_gradient_matrix import CELLS, check

#: One cell in so many by default.
_EVERY = 60


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * bool(at % _EVERY)) for at, name in enumerate(CELLS)],
)
def test_cell_on_the_device(cuda_ranks: RankPool, name: str) -> None:
    outcomes: list[Any] = cuda_ranks.run(run_cell, CELLS[name])
    check(CELLS[name], outcomes)
