"""Twenty steps of three optimizers, in random turns, equal to plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_zeroplus.testing import RankPool
from tests.engine.several.turns import BOUNDS, SETUPS, errors


@pytest.mark.parametrize(
    ("world_size", "kinds", "seeds"),
    [
        (2, ["adam"], [0]),
        pytest.param(2, ["sgd"], [0], marks=pytest.mark.slow),
        pytest.param(2, ["sgd", "adam"], [1, 10], marks=pytest.mark.slow),
        pytest.param(3, ["sgd", "adam"], [3], marks=pytest.mark.slow),
        pytest.param(2, ["sgd", "adam"], [4, 5], marks=pytest.mark.thorough),
        pytest.param(2, ["sgd", "adam"], list(range(6, 12)), marks=pytest.mark.every_cell),
        pytest.param(2, ["shared"], [0, 10], marks=pytest.mark.thorough),
        pytest.param(3, ["shared"], [3], marks=pytest.mark.slow),
        pytest.param(2, ["shared"], [4], marks=pytest.mark.thorough),
        pytest.param(2, ["shared"], [1, *range(5, 12)], marks=pytest.mark.every_cell),
    ],
)
def test_random_turns(ranks: Callable[[int], RankPool], world_size: int, kinds: list[str], seeds: list[int]) -> None:
    for found in ranks(world_size).run(errors, list(SETUPS), kinds, seeds, timeout=600):
        assert len(found) == len(SETUPS) * len(kinds) * len(seeds)
        wrong = {cell: error for cell, error in found.items() if not error <= BOUNDS[cell[1]]}
        assert not wrong
