"""N + M steps in one go, or N, and M more at another stage, with another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_zeroplus.testing import RankPool
from tests.checkpoint.model import CLASSES, Tied, fit, strategy

# Six steps of four per epoch: in the middle of an epoch.
BEFORE, AFTER = 6, 11
SETUPS: list[tuple[int, str | None]] = [(0, None), (1, None), (2, None), (3, None), (2, "cpu"), (3, "cpu")]


def _save(folder: str, setups: list[Any], **kwargs: Any) -> dict[str, Any]:
    """Save at every setup, and train on without interruption at each."""
    saved = {}
    for stage, offload in setups:
        name = f"{stage}{offload}"
        _, before = fit(strategy(stage, offload), BEFORE, save=f"{folder}/{name}", **kwargs)
        saved[name] = before, fit(strategy(stage, offload), AFTER, **kwargs)[1]
    return saved


def _resume(folder: str, pairs: list[Any], **kwargs: Any) -> dict[Any, Any]:
    return {
        (saved, stage, offload): fit(strategy(stage, offload), AFTER, f"{folder}/{saved}", **kwargs)
        for saved, (stage, offload) in pairs
    }


def _difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want)


def _check(saved: dict[str, Any], resumed: dict[Any, Any], bound: float) -> None:
    for (source, stage, offload), (loaded, trained) in resumed.items():
        before, after = saved[source]
        assert _difference(loaded, before) == 0, (source, stage, offload)
        assert _difference(trained, after) <= bound, (source, stage, offload)
        assert _difference(trained, before) > 1e-3, "nothing was trained"


def _pairs(*distances: int) -> list[Any]:
    names = [f"{stage}{offload}" for stage, offload in SETUPS]
    return [(name, SETUPS[(index + d) % len(SETUPS)]) for d in distances for index, name in enumerate(names)]


@pytest.mark.parametrize(
    ("world_size", "distances"),
    [
        (2, (1,)),
        pytest.param(2, (0,), marks=pytest.mark.slow),
        pytest.param(1, (2,), marks=pytest.mark.slow),
        pytest.param(3, (4,), marks=pytest.mark.slow),
        pytest.param(2, (3,), marks=pytest.mark.thorough),
        pytest.param(2, (2, 4, 5), marks=pytest.mark.every_cell),
        pytest.param(1, (0, 1, 3, 4, 5), marks=pytest.mark.every_cell),
    ],
)
def test_any_stage_and_number_of_ranks_to_any(
    ranks: Callable[[int], RankPool], tmp_path: Path, world_size: int, distances: tuple[int, ...]
) -> None:
    saved = ranks(2).run(partial(_save, str(tmp_path), SETUPS), timeout=300)[0]
    for resumed in ranks(world_size).run(partial(_resume, str(tmp_path), _pairs(*distances)), timeout=300):
        # Sums of gradients are rounded differently at another stage or number of ranks.
        _check(saved, resumed, 1e-6)
    assert saved["0None"][0]["seen"] == BEFORE


def _sizes_at_the_start(folder: str) -> dict[str, int]:
    fit(strategy(3), 1, save=f"{folder}/3")
    module = Tied(seed=7)
    fit(strategy(3), 2, f"{folder}/3", module=module)
    return module.sizes


def test_small_parameters_are_whole_again(ranks2: RankPool, tmp_path: Path) -> None:
    """Stage 3 keeps them on every rank, and a hook of the user's may read them before the first forward."""
    for sizes in ranks2.run(_sizes_at_the_start, str(tmp_path)):
        assert (sizes["scale"], sizes["hidden.bias"], sizes["first.weight"]) == (1, CLASSES, 0)
