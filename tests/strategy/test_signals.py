"""SIGTERM and SLURM's signal in the middle of a step: all ranks act on them before the same batch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

import lightning_zeroplus as zp
from tests.checkpoint import model
from tests.checkpoint.model import Tied
from tests.faults import job
from tests.support.forked import start, wait_until_it_says

ROOT = Path(__file__).parents[2]
KINDS = (0, 1, 2, 3, "fsdp")
AT = 2


class _Signalled(Tied):
    """In a step, other ranks send a signal to some ranks, which are in a collective or about to enter it."""

    def __init__(self, receivers: tuple[int, ...] = (), number: int = int(signal.SIGTERM)) -> None:
        super().__init__()
        self.receivers, self.number = receivers, number
        self.begun = 0

    def on_train_start(self) -> None:
        self.pids: list[Any] = [None, None]
        dist.all_gather_object(self.pids, os.getpid())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.begun += 1
        if self.trainer.global_step == AT:
            for rank in self.receivers:
                if rank != self.global_rank:
                    os.kill(self.pids[rank], self.number)
            dist.all_reduce(torch.ones(1))
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss


def _strategy(kind: int | str) -> Any:
    if kind == "fsdp":
        return zp.ZeroPlusFSDPStrategy()
    return kind if isinstance(kind, str) else model.strategy(kind)


def _terminate(cases: list[Any], folder: str) -> dict[Any, tuple[str, int, int]]:
    found = {}
    for kind, ranks in cases:
        for receivers in ranks:
            module = _Signalled(receivers)
            name = f"{kind}-{''.join(map(str, receivers))}"
            saves = [OnExceptionCheckpoint(folder, name)]
            run = model.trainer(_strategy(kind), max_steps=9, callbacks=saves, enable_checkpointing=True)
            ended = "no exception"
            try:
                run.fit(module, model.loader())
            except BaseException as error:
                ended = type(error).__name__
            again = model.trainer(_strategy(kind), max_steps=AT + 1)  # no step is left
            again.fit(_Signalled(), model.loader(), ckpt_path=f"{folder}/{name}.ckpt")
            found[name] = ended, module.begun, again.global_step
    return found


@pytest.mark.parametrize(
    "cases",
    [
        [(0, [(0,)]), (1, [(1,)]), (2, [(0, 1)]), (3, [(0,), (0, 1)]), ("fsdp", [(1,)])],
        pytest.param([(kind, [(0,), (1,), (0, 1)]) for kind in KINDS], marks=pytest.mark.thorough),
    ],
)
def test_sigterm_in_the_middle_of_a_step_ends_all_ranks_before_the_same_batch(
    ranks2: Any, tmp_path: Path, cases: list[Any]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for found in ranks2.run(_terminate, cases, str(tmp_path)):
        assert len(found) == sum(len(receivers) for _, receivers in cases)
        for name, ended in found.items():
            assert ended == (SIGTERMException.__name__, AT + 1, AT + 1), name
    assert signal.getsignal(signal.SIGTERM) is before


def _requeue(folder: str) -> list[tuple[int, list[Any], list[str]]]:
    rank = os.environ["RANK"]
    variables = {"SLURM_NTASKS": "2", "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
    variables |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS_PER_NODE": "2"}
    found = []
    for kind in KINDS:
        root = Path(folder, str(kind))
        call = Mock(return_value=0)
        with patch.dict(os.environ, variables), patch.object(signal_connector, "call", call):
            environment = SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR2)
            run = model.trainer(_strategy(kind), max_steps=5, plugins=[environment], default_root_dir=root)
            run.fit(_Signalled((0, 1), int(signal.SIGUSR2)), model.loader())
        found.append((run.global_step, [each.args[0] for each in call.call_args_list], os.listdir(root)))
        dist.barrier()
    return found


def test_slurms_signal_saves_a_checkpoint_between_batches(ranks2: Any, tmp_path: Path) -> None:
    for rank, answers in enumerate(ranks2.run(_requeue, str(tmp_path))):
        for step, calls, files in answers:
            assert step == 5 and files == ["hpc_ckpt_1.ckpt"]
            assert calls == ([["scontrol", "requeue", "7"]] if rank == 0 else [])


@pytest.mark.slow
@pytest.mark.parametrize("to_all", [True, False])
def test_a_launched_job_ends_cleanly(tmp_path: Path, to_all: bool) -> None:
    """SIGTERM to all processes of a job, or only to the one that has launched the others."""
    output = tmp_path / "output"
    output.touch()
    arguments = ["--stage", "3", "--folder", str(tmp_path), "--fault", "interrupted"]  # each step says "ready"
    main = start(job.main, arguments, output, output)
    assert main.pid is not None
    try:
        wait_until_it_says(main, r"ready \|", output)
        (os.killpg if to_all else os.kill)(main.pid, signal.SIGTERM)
        main.join(60)
        said = output.read_text()
        assert main.exitcode == 0, said
        assert "finished |" not in said and "Error" not in said, said
        assert said.count("SIGTERMException") <= 2, said
    finally:
        with suppress(ProcessLookupError):
            os.killpg(main.pid, signal.SIGKILL)
        main.join()


@pytest.mark.slow
@pytest.mark.sampled(every=2, otherwise="every_cell")
@pytest.mark.parametrize(("stage", "to_a_rank"), [("3", True), ("fsdp", True), ("2", False)])
def test_a_job_of_torchrun_ends_cleanly(tmp_path: Path, stage: str, to_a_rank: bool) -> None:
    """SIGTERM to one of the ranks, or to torchrun, which passes it on and kills what has not ended 30 s later."""
    output = tmp_path / "output"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = ["-m", "tests.faults.job", "--stage", stage, "--folder", str(tmp_path), "--fault", "interrupted"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with output.open("w") as said:
        streams: Any = {"stdout": said, "stderr": subprocess.STDOUT}
        main = subprocess.Popen([*torchrun, *arguments], cwd=ROOT, env=environment, start_new_session=True, **streams)
    try:
        wait_until_it_says(main, r"ready \| \d+ \|", output)
        ready = re.search(r"^ready \| (\d+) \|", output.read_text(), re.MULTILINE)
        assert ready is not None, output.read_text()
        os.kill(int(ready[1]) if to_a_rank else main.pid, signal.SIGTERM)
        status, text = main.wait(60), output.read_text()
        assert "finished |" not in text and "SIGKILL" not in text and "exitcode" not in text, text
        assert status == 0 if to_a_rank else "SignalException" in text, text
    finally:
        with suppress(ProcessLookupError):
            os.killpg(main.pid, signal.SIGKILL)
        main.wait()
