"""``benchmarks/norms_cost.py`` takes turns with and without the callback."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT

pytestmark = pytest.mark.slow


def test_it_measures() -> None:
    sizes = ["--stage", "2", "--rounds", "2", "--interval", "2", "--hidden", "8"]
    command = [sys.executable, "benchmarks/norms_cost.py", *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"stage 2: .* ratio [\d.]+ \([\d.]+ to [\d.]+\), goal 1\.02\n", done.stdout)
