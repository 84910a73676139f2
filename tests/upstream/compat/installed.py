"""Other releases of DeepSpeed and torch, each in a folder of its own, kept between runs; and ranks that import one."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from tests.conftest import Ranks, settle
from tests.docs.blocks import ROOT

#: By default the oldest release that is supported, and the last before DeepSpeed ordered the streams of a bucket. A
#: wheel or a checkout is given by its path.
VERSIONS = tuple(os.environ.get("DEEPSPEED_VERSIONS", "0.18.9 0.19.2").split())
#: Several GB each, so only by wish: `make compat` names the oldest and the newest.
TORCH_VERSIONS = tuple(os.environ.get("TORCH_VERSIONS", "").split())
#: What was asked for: if it cannot be installed, the tests fail. The default releases are skipped, without a network.
REQUESTED = frozenset((*os.environ.get("DEEPSPEED_VERSIONS", "").split(), *TORCH_VERSIONS))


def is_path(version: str) -> bool:
    """Whether a "version" is a wheel or a checkout."""
    return os.sep in version or version.endswith(".whl")


@functools.cache
def folder(version: str) -> Path:
    """A folder with that DeepSpeed and nothing else; see :data:`REQUESTED`."""
    how = ["--no-deps", "--no-build-isolation"]
    if not is_path(version):
        target = _cache() / f"deepspeed-{version}"
        if not (target / "deepspeed" / "__init__.py").exists():
            _install(version, target, f"deepspeed=={version}", how, minutes=5)
        return target
    source = Path(version).resolve()
    if not source.exists():
        pytest.fail(f"DEEPSPEED_VERSIONS names {version!r}, which does not exist")
    target = _cache() / f"deepspeed-of-{hashlib.sha256(str(source).encode()).hexdigest()[:8]}"
    shutil.rmtree(target, ignore_errors=True)  # a checkout changes between two runs
    with tempfile.TemporaryDirectory() as folder:
        if source.is_dir():  # setup.py writes to the folder
            copy = Path(folder, "deepspeed")
            shutil.copytree(source, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "build"))
            source = copy
        _install(version, target, str(source), how, minutes=5)
    return target


@functools.cache
def torch_folder(version: str) -> Path:
    """A folder with that torch and what it needs; see :data:`REQUESTED`."""
    target = _cache() / f"torch-{version}"
    if not (target / ".complete").exists():
        _install(version, target, f"torch=={version}", [], minutes=30)
        (target / ".complete").touch()
    return target


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-zeroplus"


def _install(version: str, target: Path, requirement: str, how: list[str], minutes: int) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", *how, "--target", str(target), requirement]
    try:
        done = subprocess.run(
            command, env={**os.environ, "DS_BUILD_OPS": "0"}, capture_output=True, text=True, timeout=60 * minutes
        )
    except subprocess.TimeoutExpired:
        _give_up(version, f"pip could not install {requirement} in {minutes} minutes")
    if done.returncode:
        _give_up(version, f"pip could not install {requirement}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")


def _give_up(version: str, reason: str) -> NoReturn:
    if version in REQUESTED:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _import_deepspeed() -> None:
    settle()
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # An operator for inference, which every release would build anew, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def run_python(target: Path, *arguments: str) -> tuple[int, str]:
    """Run Python with what is in a folder, from the root of the repository.

    Returns:
        The exit status, and the output.
    """
    changed = {
        "PYTHONPATH": os.pathsep.join((str(target), str(ROOT))),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",  # PyPI's releases of torch have CUDA
        "TORCH_EXTENSIONS_DIR": str(target.with_name(f"{target.name}-extensions")),
    }
    workers = {name for name in os.environ if name.startswith("PYTEST_")}
    environment = {name: value for name, value in os.environ.items() if name not in workers}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment | changed, cwd=ROOT, capture_output=True, text=True, timeout=3600
    )
    return done.returncode, done.stdout + done.stderr[-2000:]


def check_tests(target: Path, *arguments: str) -> None:
    """Run pytest with what is in a folder: some tests pass, and none fails."""
    code, output = run_python(target, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *arguments)
    assert code == 0, "\n".join(output.splitlines()[-60:])
    assert re.search(r"\b[1-9]\d* passed", output)


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
