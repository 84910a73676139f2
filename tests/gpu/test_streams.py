"""The races of ``streams.py``: wrong weights on every run without the fix, never with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.streams import LONG_STEPS, RACES
from tests.upstream.compat.installed import folder

ROOT = Path(__file__).parents[2]
COPIED, REFILLED, OVERSIZED = RACES
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def measure(engine: str, *path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.streams", engine],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT, *sys.path)))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_stock_is_wrong_on_every_run() -> None:
    wrong = measure("stock")["wrong"]
    assert all(wrong[REFILLED]) and all(wrong[OVERSIZED])


def test_the_older_one_too() -> None:
    result = measure("stock", folder("0.19.2"))
    assert result["version"] == "0.19.2"
    assert all(result["wrong"][COPIED])


def test_ours_is_never_wrong() -> None:
    wrong = measure("ours")["wrong"]
    assert set(wrong) == {*RACES, f"{LONG_STEPS} steps"}
    assert not any(map(any, wrong.values()))
