"""The gradient matrix on the simulated device: the same cells, references and bounds as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_zeroplus.testing import RankPool
from tests.matrix.cells import run_cell
from tests.matrix.test_gradient_matrix import CELLS, check
from tests.support.turns import turn

#: One cell in so many with ``--thorough``, and one in so many by default.
_THOROUGH, _EVERY = 15, 60


def _marks(name: str) -> list[pytest.MarkDecorator]:
    if turn(name) % _EVERY == 0:
        return []
    return [pytest.mark.thorough] if turn(name) % _THOROUGH == 0 else [pytest.mark.every_cell]


@pytest.mark.matrix
@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in CELLS])
def test_cell_on_the_device(cuda_ranks: RankPool, name: str) -> None:
    outcomes: list[Any] = cuda_ranks.run(run_cell, CELLS[name])
    check(CELLS[name], outcomes)
