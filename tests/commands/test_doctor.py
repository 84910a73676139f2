"""doctor: what it finds, what it mends, what it exits with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_zeroplus.doctor import Finding, checks, run
from lightning_zeroplus.doctor.checks import accelerator, builders, capabilities, locks, versions
from lightning_zeroplus.doctor.smoke import _first_line
from lightning_zeroplus.testing import RankError, RankPool


def _named(findings: object, name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]  # type: ignore[attr-defined]
    return found


@pytest.mark.slow
def test_the_whole_report_as_json() -> None:
    """Real processes, a real build folder; libraries may print what they like, stdout is JSON."""
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name not in ("DS_ACCELERATOR", "RANK")}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_zeroplus", "doctor", "--json"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    report = json.loads(done.stdout)
    findings = [Finding(**entry) for entry in report["findings"]]
    assert done.returncode == 0 and report["ok"], [f for f in findings if f.status == "problem"]
    sections = ["versions", "accelerator", "capabilities", "engine", "operators", "locks", "smoke"]
    assert list(dict.fromkeys(finding.section for finding in findings)) == sections
    assert _named(findings, "torch").detail == torch.__version__
    assert _named(findings, "gloo").status == "ok"
    for stage in (2, 3):
        stage_ = _named(findings, f"stage {stage}")
        assert stage_.status == "ok" and "4 backwards per step" in stage_.detail
    # What gloo can do differs between versions of torch; that the probes are real is seen from an operation it lacks.
    assert _named(findings, "gloo PREMUL_SUM") == Finding(
        "smoke", "gloo PREMUL_SUM", "unavailable", "Cannot use ReduceOp.PREMUL_SUM with Gloo"
    )


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """A lock that nobody holds."""
    path = tmp_path / "some_op" / "lock"
    path.parent.mkdir()
    path.touch()
    return path


def test_a_stale_lock_is_a_problem_and_is_mended(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(checks, "find_locks", lambda root: _find_locks(lock.parent.parent)):
        assert run(["--no-smoke"]) == 1
        assert "problem: locks: some_op: a dead process left" in capsys.readouterr().out
        assert lock.exists()
        assert run(["--no-smoke", "--fix"]) == 0
        assert not lock.exists()
        assert run(["--no-smoke"]) == 0
    assert "no problem found" in capsys.readouterr().out


def _find_locks(root: Path) -> list[checks.JitLock]:
    from lightning_zeroplus.engine.upstream.jit_locks import find_locks

    return find_locks(root)


def test_the_lock_of_a_live_builder_stays(lock: Path) -> None:
    with lock.open():
        (finding,) = locks(fix=True, root=lock.parent.parent)
    assert finding.status == "ok" and f"being built by process {os.getpid()}" in finding.detail
    assert lock.exists()


def test_an_untested_version_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = checks.importlib.metadata.version

    def version(name: str) -> str:
        if name == "psutil":
            raise checks.importlib.metadata.PackageNotFoundError(name)
        return "2.9.1" if name == "torch" else real(name)

    monkeypatch.setattr(checks.importlib.metadata, "version", version)
    found = list(versions())
    assert _named(found, "torch").status == "problem" and "2.9.1, untested" in _named(found, "torch").detail
    assert _named(found, "psutil").status == "problem" and "pip install" in _named(found, "psutil").detail
    assert _named(found, "lightning").status == "ok"


@pytest.mark.parametrize(("value", "status"), [("cpu", "ok"), ("xpu", "problem"), ("cuda", "problem")])
def test_the_accelerator_of_the_environment(value: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _named(accelerator(), "DS_ACCELERATOR").status == status


def test_what_torch_lacks_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _named(capabilities(), "gradient dtypes").status == (
        "native" if hasattr(torch.Tensor, "grad_dtype") else "unavailable"
    )
    monkeypatch.delattr(torch.distributed.fsdp, "fully_shard")
    assert _named(capabilities(), "FSDP2").status == "unavailable"
    with patch.object(dist, "is_gloo_available", lambda: False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert _named(accelerator(), "gloo").status == "problem"


def test_a_torch_with_cuda_and_no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    from deepspeed.ops.op_builder.builder import MissingCUDAException

    class Builder:
        name = "fused"

        def is_compatible(self, verbose: bool) -> bool:
            raise MissingCUDAException("CUDA_HOME does not exist, unable to compile CUDA op(s)")

    monkeypatch.setitem(ALL_OPS, "fused", Builder())
    monkeypatch.setitem(ALL_OPS, "dc", Builder())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = _named(list(builders()), "fused")
    assert found.status == "unavailable" and "MissingCUDAException: CUDA_HOME does not exist" in found.detail
    status, detail = checks._deepcompile_operators()
    assert status == "unavailable" and "MissingCUDAException" in detail
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert checks._deepcompile_operators() == ("patched", "its operators in Python, on CPU with gloo")


def _fails() -> None:
    raise OSError("no route")


@pytest.mark.slow
def test_a_rank_that_fails_is_told_in_a_line() -> None:
    with RankPool(1) as ranks, pytest.raises(RankError) as raised:
        ranks.run(_fails)
    assert _first_line(raised.value) == "rank 0 raised: OSError: no route"
