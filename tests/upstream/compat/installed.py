"""Other releases of DeepSpeed, each in a folder of its own, kept between runs; and ranks that import one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Ranks, settle

#: By default the oldest release that is supported, and the last before DeepSpeed ordered the streams of a bucket.
VERSIONS = tuple(os.environ.get("DEEPSPEED_VERSIONS", "0.18.9 0.19.2").split())


def folder(version: str) -> Path:
    """A folder with that DeepSpeed and nothing else; skips the test if it cannot be installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "lightning-zeroplus" / f"deepspeed-{version}"
    if not (target / "deepspeed" / "__init__.py").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        command += ["--target", str(target), f"deepspeed=={version}"]
        try:
            done = subprocess.run(
                command, env={**os.environ, "DS_BUILD_OPS": "0"}, capture_output=True, text=True, timeout=300
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"pip could not install DeepSpeed {version} in five minutes")
        if done.returncode:
            pytest.skip(f"pip could not install DeepSpeed {version}: {done.stderr.strip().splitlines()[-1]}")
    return target


def _import_deepspeed() -> None:
    settle()
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # An operator for inference, which every release would build anew, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class OtherRanks(Ranks):
    """Two ranks that import the DeepSpeed of a folder."""

    def __init__(self, target: Path) -> None:
        super().__init__(2, timeout=120, initializer=_import_deepspeed)
        self._target = str(target)

    def _start(self) -> None:
        sys.path.insert(0, self._target)  # which spawned processes take over
        try:
            super()._start()
        finally:
            sys.path.remove(self._target)
