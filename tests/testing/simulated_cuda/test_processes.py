"""How processes get the device: pools, scripts, the library's build, and what is refused."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zeroplus.testing import RankError, RankPool
from lightning_zeroplus.testing.simulated_cuda import SimulatedCudaError, library, why_unavailable
from lightning_zeroplus.testing.simulated_cuda.__main__ import main

needs_device = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`device` must be one of \('cpu', 'cuda', 'simulated_cuda'\), not 'gpu'"):
        RankPool(2, device="gpu")  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_device_cuda_says_so() -> None:
    with pytest.raises(RuntimeError, match=r'`RankPool\(device="cuda"\)` needs a GPU.*Use "simulated_cuda"'):
        RankPool(1, device="cuda").run(os.getpid)


def test_a_context_that_cannot_load_the_device_is_refused() -> None:
    with pytest.raises(
        ValueError, match="`mp_context` must be None with `device='simulated_cuda'`.*Leave `mp_context` out"
    ):
        RankPool(2, device="simulated_cuda", mp_context=multiprocessing.get_context("spawn"))


def test_the_default_is_the_cpu() -> None:
    assert RankPool(1).device == "cpu"


def test_the_device_is_not_loaded_after_torch() -> None:
    with pytest.raises(SimulatedCudaError, match="torch has been imported before.*python -m lightning_zeroplus"):
        library.load(2)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    if "compiler" not in str(why_unavailable()):
        pytest.skip(str(why_unavailable()))
    with pytest.raises(SimulatedCudaError, match="install g\\+\\+, or set the variable CXX"):
        RankPool(1, device="simulated_cuda").run(os.getpid)


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that is built at once, in a cache of its own."""
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "module.cpp").write_text("int answer() { return 42; }\n")
    monkeypatch.setattr(library, "_SOURCES", sources)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return sources


@needs_device
def test_it_is_built_once_for_its_sources(small_sources: Path) -> None:
    first = library.build()
    made = first.stat().st_mtime_ns
    assert library.build() == first and first.stat().st_mtime_ns == made
    (small_sources / "module.cpp").write_text("int answer() { return 43; }\n")
    assert library.build() != first


@needs_device
def test_it_is_built_before_it_is_needed(small_sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--build"]) == 0
    assert list((small_sources.parent / "cache").glob("simulated_cuda-*/*.so"))
    with pytest.raises(SystemExit):
        main([])
    assert "a script to run, or --build" in capsys.readouterr().err


@needs_device
def test_concurrent_builds_wait_for_one(small_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Path] = []
    compile_, lock = library._compile, library._locked
    at_the_lock, all_are = threading.Semaphore(0), 4

    def counted(path: Path) -> None:
        compiled.append(path)
        if len(compiled) == 1:
            for _ in range(all_are):
                assert at_the_lock.acquire(timeout=60), "a build did not come to the lock"
        compile_(path)

    def noted(path: Path) -> Any:
        at_the_lock.release()
        return lock(path)

    monkeypatch.setattr(library, "_compile", counted)
    monkeypatch.setattr(library, "_locked", noted)
    threads = [threading.Thread(target=library.build) for _ in range(all_are)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1


@needs_device
def test_a_compilers_error_is_shown_and_leaves_nothing(small_sources: Path, tmp_path: Path) -> None:
    (small_sources / "module.cpp").write_text("int answer() { return nothing; }\n")
    with pytest.raises(SimulatedCudaError, match="could not be built(.|\n)*nothing"):
        library.build()
    assert not list((tmp_path / "cache").rglob("*.so")) and not list((tmp_path / "cache").rglob("*.o"))


_SCRIPT = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
total = torch.ones(2, device="cuda") * (dist.get_rank() + 1)
dist.all_reduce(total)
assert total.tolist() == [3.0, 3.0] and total.device.index == dist.get_rank() == int(os.environ["LOCAL_RANK"])
open(sys.argv[1] + os.environ["RANK"], "w").write(f"{torch.cuda.device_count()} {sys.argv[0]}")
sys.exit(int(sys.argv[2]) if dist.get_rank() else 0)
"""


@pytest.mark.slow
@needs_device
def test_a_script_runs_on_two_devices(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    for code in (0, 3):
        assert main([str(script), f"{tmp_path}/out", str(code)]) == code
        assert [Path(f"{tmp_path}/out{rank}").read_text() for rank in range(2)] == [f"2 {script}"] * 2


@pytest.mark.slow
@needs_device
def test_the_module_is_a_command(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch; print(torch.ones(1, device='cuda').device)")
    command = [sys.executable, "-m", "lightning_zeroplus.testing.simulated_cuda", "--ranks", "1", "script.py"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "cuda:0\n"


def _fails() -> None:
    raise KeyError("planned")


def _pid() -> int:
    return os.getpid()


@pytest.mark.slow
@needs_device
def test_ranks_start_again_after_a_failure() -> None:
    with RankPool(1, device="simulated_cuda") as pool:
        with pytest.raises(RankError, match="planned"):
            pool.run(_fails)
        (pid,) = pool.run(_pid)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
