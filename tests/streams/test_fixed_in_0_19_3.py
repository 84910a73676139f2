"""The race that DeepSpeed 0.19.3 fixed: the reduction of a bucket waited for the current stream only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

VERSION = "0.19.2"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def old_deepspeed() -> Iterator[Path]:
    """A folder with that version and nothing else, kept between runs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "lightning-zeroplus" / f"deepspeed-{VERSION}"
    if not (target / "deepspeed" / "__init__.py").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        command += ["--target", str(target), f"deepspeed=={VERSION}"]
        try:
            done = subprocess.run(
                command, env={**os.environ, "DS_BUILD_OPS": "0"}, capture_output=True, text=True, timeout=300
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"pip could not install DeepSpeed {VERSION} in five minutes")
        if done.returncode:
            pytest.skip(f"pip could not install DeepSpeed {VERSION}: {done.stderr.strip().splitlines()[-1]}")
    yield target


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
    assert result["version"] == VERSION
    assert result["single"] == []
    for model in ("chain", "towers"):
        found = result["several"][model]
        pairs = {(race["buffer"].split()[0], race["first"], race["second"]) for race in found}
        assert ("ipg", "reduce_independent_p_g_buckets_and_remove_grads", "average_tensor") in pairs, model
