"""``benchmarks/peers.py`` trains every contender to the same loss: it raises otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_peers(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/peers.py", "--quick", "--output", str(tmp_path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=300)
    rows = {row["contender"]: row for row in json.loads((tmp_path / "peers.json").read_text())}
    assert len(rows) == 13 and all(row["milliseconds"] > 0 for row in rows.values())
    # Not their ratios: other programs' bytes on the loopback device count too, and the model is tiny.
    assert all(row["wire_mib"] > 0 and row["grown_mib"] > 0 for row in rows.values())
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
