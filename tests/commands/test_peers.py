"""``benchmarks/peers.py`` trains every contender to the same loss, and a stage-1 step sends what DDP's sends."""

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
    assert len(rows) == 10 and all(row["milliseconds"] > 0 for row in rows.values())
    assert rows["zeroplus_1"]["wire_mib"] < 1.25 * rows["ddp"]["wire_mib"] < rows["deepspeed_1"]["wire_mib"]
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
