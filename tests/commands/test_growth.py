"""``benchmarks/growth.py``: what one more parameter, or backward, costs."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_what_one_more_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    grown: Any = runpy.run_path(str(ROOT / "benchmarks" / "growth.py"))["grown"]
    single = {(10, "ddp"): 0.01, (10, "own"): 0.02, (20, "ddp"): 0.02, (20, "own"): 0.05, (40, "ddp"): 0.04}
    # In the second round the machine is slower by half.
    taken = {key: [seconds, 1.5 * seconds] for key, seconds in single.items()}
    rows = {(row.number, row.contender): row for row in grown("parameters", taken | {(40, "own"): [0.11, 0.165]})}
    assert rows[10, "own"].marginal is rows[10, "own"].to_ddp is None
    assert [rows[number, "own"].milliseconds for number in (10, 20)] == pytest.approx([25.0, 62.5])
    assert [rows[number, "own"].marginal for number in (20, 40)] == pytest.approx([3.75, 3.75])
    assert [rows[number, "own"].to_ddp for number in (20, 40)] == pytest.approx([3.0, 3.0])
    rows = {(row.number, row.contender): row for row in grown("backwards", taken | {(40, "own"): [0.08, 0.12]})}
    assert rows[40, "own"].marginal == pytest.approx(2.5)  # since the first number
    assert rows[40, "own"].to_ddp == pytest.approx(2.0)


@pytest.mark.slow
def test_growth(tmp_path: Path) -> None:
    sizes = ["--parameters", "4", "--parameters", "8", "--backwards", "1", "--backwards", "2", "--rounds", "2"]
    command = [sys.executable, "benchmarks/growth.py", *sizes, "--contender", "zeroplus_1", "--output", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=300)
    rows = json.loads((tmp_path / "growth.json").read_text())
    assert len(rows) == 8 and all(row["milliseconds"] > 0 for row in rows)
    assert (tmp_path / "growth.md").read_text().count("zeroplus_1") == 4
