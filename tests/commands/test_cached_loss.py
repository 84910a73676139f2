"""``benchmarks/cached_loss.py`` trains every contender to the same loss: it raises otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_cached_loss(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    command = [sys.executable, "benchmarks/cached_loss.py", "--quick", "--output", str(tmp_path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=300)
    rows = json.loads((tmp_path / "cached_loss.json").read_text())
    # Not their memory: that of a tiny batch is noise.
    assert len(rows) == 6 and all(row["seconds"] > 0 and row["loss"] > 0 for row in rows)
