"""What ``tests/gpu`` shows on a GPU is known to be there: stock DeepSpeed 0.19.8 races in the model, ours does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_zeroplus.testing import RankPool
from tests.gpu.streams import RACES
from tests.testing.streams.scenarios import Scenario, ours, run, stock


def _races(scenario: Scenario, engine: Any) -> int:
    return len(run(scenario, engine).races)


@pytest.mark.parametrize("name", list(RACES)[1:])
def test_they_race_on_one_rank_in_the_model(ranks: Callable[[int], RankPool], name: str) -> None:
    assert ranks(1).run(_races, RACES[name], stock)[0] > 0
    assert ranks(1).run(_races, RACES[name], ours) == [0]
