"""Programs as users write them, on real GPUs with NCCL: equal to DDP there, or refused in the same words."""

from __future__ import annotations

import pytest

from lightning_zeroplus.testing import RankPool
from tests.programs.cell import Cells
from tests.programs.on_gpus import LEFT_OUT
from tests.programs.program import programs
from tests.support.turns import turn

_PROGRAMS = programs()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, id=f"{name}-{strategy}", marks=[pytest.mark.every_cell] * bool(later))
        for name, program in _PROGRAMS.items()
        if name not in LEFT_OUT
        # The strategies take turns.
        for later in range(len(program.strategies))
        for strategy in [program.strategies[(turn(name) + later) % len(program.strategies)]]
    ],
)
def test_program_on_a_gpu(gpu_ranks: RankPool, cells: Cells, name: str, strategy: str) -> None:
    outcome = cells.run(gpu_ranks, _PROGRAMS[name], strategy)
    assert outcome.right, f"{outcome.verdict}: {outcome.details}"
