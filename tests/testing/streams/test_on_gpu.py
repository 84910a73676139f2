"""The races of ``on_gpu.py``: wrong weights on every run without the fix, never with it. Not yet run on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zeroplus.testing import RankPool
from tests.testing.streams.on_gpu import LONG_STEPS, RACES
from tests.testing.streams.scenarios import Scenario, ours, run, stock
from tests.upstream.compat.installed import folder

ROOT = Path(__file__).parents[3]
COPIED, REFILLED, OVERSIZED = RACES


def measure(engine: str, *path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.testing.streams.on_gpu", engine],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_stock_is_wrong_on_every_run() -> None:
    wrong = measure("stock")["wrong"]
    assert all(wrong[REFILLED]) and all(wrong[OVERSIZED])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_older_one_too() -> None:
    result = measure("stock", folder("0.19.2"))
    assert result["version"] == "0.19.2"
    assert all(result["wrong"][COPIED])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ours_is_never_wrong() -> None:
    wrong = measure("ours")["wrong"]
    assert set(wrong) == {*RACES, f"{LONG_STEPS} steps"}
    assert not any(map(any, wrong.values()))


def _races(scenario: Scenario, engine: Any) -> int:
    return len(run(scenario, engine).races)


@pytest.mark.parametrize("name", [REFILLED, OVERSIZED])
def test_they_race_on_one_rank_in_the_model(ranks: Callable[[int], RankPool], name: str) -> None:
    """So that what a GPU is asked to show is known to be there: stock 0.19.8 races, ours does not."""
    assert ranks(1).run(_races, RACES[name], stock)[0] > 0
    assert ranks(1).run(_races, RACES[name], ours) == [0]
