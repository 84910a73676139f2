"""How a job starts and ends: Lightning's subprocess launcher, torchrun, one device, a rank that fails."""

from __future__ import annotations

import atexit
import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer

import lightning_zeroplus as zp
from lightning_zeroplus.strategy.common.launcher import LaunchedRanks
from tests.matrix.cells import Cell, run_cell
from tests.strategy.test_fabric import train as train_with_fabric
from tests.support import forked
from tests.support.scripts import train

ROOT = Path(__file__).parents[2]
SCRIPT = "tests.support.scripts.train"


#: A command that takes longer hangs.
_HANGS_S = 600
#: Within so many seconds of a rank's failure its job ends. A collective alone may wait for 30 minutes.
_ENDS_S = 30


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_HANGS_S
    )


def _weights(done: subprocess.CompletedProcess[str], world: int) -> float:
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(rf"world {world} weights (-?[\d.]+)", done.stdout)
    assert len(found) == 1, done.stdout
    return float(found[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["zeroplus_stage2", pytest.param("zeroplus_stage3_offload", marks=pytest.mark.every_cell)]
)
def test_every_launch_trains_the_same(strategy: str) -> None:
    launched = _weights(_run("-m", SCRIPT, "--strategy", strategy), world=2)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", SCRIPT)
    assert _weights(_run(*torchrun, "--strategy", strategy), world=2) == launched
    ddp = _weights(forked.run(train.main, "--strategy", "ddp"), world=2)
    assert launched == pytest.approx(ddp, abs=2e-5)


def test_one_device() -> None:
    ours, ddp = (
        _weights(forked.run(train.main, "--strategy", strategy, "--devices", "1"), world=1)
        for strategy in ("zeroplus_stage3", "ddp")
    )
    assert ours == pytest.approx(ddp, abs=2e-5)


def _processes_started(fit: Callable[[], object]) -> int:
    os.environ.pop("LOCAL_SIZE", None)  # of an earlier test
    fit()
    with patch.object(subprocess, "Popen", wraps=subprocess.Popen) as started:
        fit()
    return started.call_count


@pytest.mark.parametrize("function", [run_cell, train_with_fabric])
def test_training_starts_no_processes(ranks2: Any, function: Callable[[Cell], object]) -> None:
    """Upstream's ZeRO-3 starts one at every reduction of a bucket, unless its own launcher was used."""
    assert ranks2.run(_processes_started, partial(function, Cell(3, "several"))) == [0, 0]


def train_without_a_compiler() -> None:
    """`train.main` where DeepSpeed may not build the operator of its process group, and nothing can be compiled."""
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    os.environ.update(TORCH_EXTENSIONS_DIR=str(Path.cwd() / "built"), PATH="")
    backend.build_shm_op = _build
    (train_with_fabric_by_name if "--fabric" in sys.argv else train.main)()
    assert backend.build_shm_op is _build  # it is the user's again


def train_with_fabric_by_name() -> None:
    *_, strategy, _, devices = sys.argv
    fabric = Fabric(accelerator="cpu", devices=int(devices), strategy=strategy)
    fabric.launch()
    net = torch.nn.Linear(4, 2)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    fabric.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    if fabric.is_global_zero:
        print(f"world {fabric.world_size} weights 0.0")


def _build() -> None:
    raise AssertionError("DeepSpeed builds an operator that training does not use")


_STAGES = [f"zeroplus_stage{stage}" for stage in range(4)]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("strategy", "devices", "options"),
    [
        ("zeroplus_stage2", 1, ()),
        ("zeroplus_stage3", 2, ()),
        *(pytest.param(strategy, 2, (), marks=pytest.mark.thorough) for strategy in [*_STAGES[:3], "zeroplus_fsdp"]),
        *(pytest.param(strategy, 2, ("--fabric",), marks=pytest.mark.thorough) for strategy in _STAGES),
    ],
)
def test_the_first_fit_on_cpu_compiles_nothing(
    tmp_path: Path, strategy: str, devices: int, options: tuple[str, ...]
) -> None:
    command = (*options, "--strategy", strategy, "--devices", str(devices))
    _weights(forked.run(train_without_a_compiler, *command, folder=tmp_path), world=devices)
    assert not [path for path in tmp_path.glob("built/**/*") if path.is_file()]


@pytest.mark.alone
@pytest.mark.parametrize("strategy", ["zeroplus_stage2", "zeroplus_stage3"])
def test_the_first_step_comes_soon(tmp_path: Path, strategy: str) -> None:
    """In new processes, with nothing compiled before: within 15 s, or three times what the imports take by themselves.

    The second process imports everything before it joins, on a slow machine for longer than 15 s.
    """
    begun = time.monotonic()
    _run("-c", "import deepspeed, lightning_zeroplus; from lightning.pytorch import Trainer")
    imports = time.monotonic() - begun
    caches = {"TORCH_EXTENSIONS_DIR": "built", "TORCHINDUCTOR_CACHE_DIR": "inductor", "XDG_CACHE_HOME": "cache"}
    with patch.dict(os.environ, {name: str(tmp_path / folder) for name, folder in caches.items()}):
        done = _run("-m", SCRIPT, "--strategy", strategy)
    _weights(done, world=2)
    (seconds,) = re.findall(r"first step after ([\d.]+) s", done.stdout)
    assert float(seconds) < max(15, 3 * imports), (seconds, imports)
    # In its cache matplotlib lists fonts, which is not ours.
    assert not [path for path in tmp_path.glob("[bi]*/**/*") if path.is_file()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", [*(f"zeroplus_stage{stage}" for stage in range(4)), "zeroplus_stage3_offload"])
def test_one_gpu(strategy: str) -> None:
    common = ("-m", SCRIPT, "--devices", "1", "--accelerator", "cuda", "--strategy")
    ours = _weights(_run(*common, strategy), world=1)
    assert ours == pytest.approx(_weights(_run(*common, "ddp"), world=1), abs=1e-3)


@pytest.mark.thorough  # tests/faults has more failures, in ranks that are forked
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.every_cell), 1])
def test_a_failing_rank_ends_the_job_with_its_error(rank: int) -> None:
    done = _run("-m", SCRIPT, "--fail-on", str(rank))
    (raised,) = re.findall(r"raised at ([\d.]+)", done.stdout)
    assert time.time() - float(raised) < _ENDS_S
    assert done.returncode != 0
    errors = re.findall(r"^(?:\[rank\d\]: )?(\w+Error: .*)$", done.stderr, flags=re.MULTILINE)
    assert errors[0] == f"RuntimeError: planned failure on rank {rank}", done.stderr[-4000:]


@pytest.mark.alone
@pytest.mark.parametrize(("stage", "rank"), [(2, 1), (3, 0)])
def test_a_rank_that_fails_in_a_window_ends_the_job_at_once(rank: int, stage: int) -> None:
    """Upstream flushes in ``finally``: the error would wait for the other ranks' flush."""
    done = _run("-m", SCRIPT, "--fail-on", str(rank), "--in-window", "--strategy", f"zeroplus_stage{stage}")
    assert done.returncode != 0
    errors = re.findall(r"^(?:\[rank\d\]: )?(\w+Error: .*)$", done.stderr, flags=re.MULTILINE)
    assert errors[0] == f"RuntimeError: planned failure on rank {rank}", done.stderr[-4000:]
    (seconds,) = re.findall(r"surfaced after ([\d.]+) s", done.stdout)
    assert float(seconds) < 1


def test_spawn_is_refused_clearly() -> None:
    """Lightning has no spawning launcher for the DeepSpeed family."""
    with pytest.raises(TypeError, match="start_method"):
        zp.ZeroPlusStrategy(start_method="spawn")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="zeroplus_stage3_spawn"):
        Trainer(strategy="zeroplus_stage3_spawn", accelerator="cpu", devices=2)


def _told(error: BaseException, caplog: pytest.LogCaptureFixture) -> str:
    """What a launching rank says of another that has ended with status 1, when it raises ``error``."""
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    ended.wait()
    ranks = LaunchedRanks([ended])
    try:
        raise error
    except BaseException:
        ranks.failed_here()
    atexit.unregister(ranks._at_exit)
    return caplog.text


def test_an_error_follows_from_a_rank_that_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    assert "Local rank 1" in _told(RuntimeError("connection closed"), caplog)


def test_an_interrupt_does_not_follow_from_a_rank_that_it_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    assert _told(KeyboardInterrupt(), caplog) == ""
