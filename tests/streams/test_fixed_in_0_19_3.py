"""The race that DeepSpeed 0.19.3 fixed: the reduction of a bucket waited for the current stream only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.streams.conftest import OLD_VERSION, note_races

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_reduction_reads_a_bucket_that_other_streams_still_fill(old_deepspeed: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.streams.other_deepspeed"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(old_deepspeed), str(ROOT)])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["version"] == OLD_VERSION
    assert result["single"] == []
    for model in ("chain", "towers"):
        found = result["several"][model]
        note_races(f"DeepSpeed {OLD_VERSION}", model, len(found))
        pairs = {(race["buffer"].split()[0], race["first"], race["second"]) for race in found}
        assert ("ipg", "reduce_independent_p_g_buckets_and_remove_grads", "average_tensor") in pairs, model
