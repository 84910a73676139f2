"""kill -9 in the middle of a save: what was saved before is still there, to the bit, or what was being saved is."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_zeroplus.checkpoint import atomic
from lightning_zeroplus.testing.ranks import _Setup
from tests.checkpoint import saving
from tests.support.forkserver import fork_server

SEED = 20
_TIME_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Processes that start with everything imported."""
    return fork_server()


def run_job(
    context: ForkServerContext, job: saving.Job, folder: Path, serve: Callable[..., None] = saving.serve
) -> tuple[list[Any], list[int | None]]:
    """Run the job to its end, and return what was said and the exit codes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks, pipes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe(duplex=False)
        setup = _Setup(rank, 2, store.port, _TIME_LIMIT_S, str(folder / f"stack{rank}"), "cpu", 0)
        ranks.append(context.Process(target=serve, args=(setup, job, theirs)))
        ranks[-1].start()
        theirs.close()
        pipes.append(ours)
    said = _listen(pipes)
    for process in ranks:
        process.join(_TIME_LIMIT_S)
        hung = process.exitcode is None
        if hung:
            process.kill()
        assert not hung, "a rank waited for one that was dead"
    return said, [process.exitcode for process in ranks]


def _listen(pipes: list[Connection]) -> list[Any]:
    said, left = [], list(pipes)
    while left:
        ready = wait(left, _TIME_LIMIT_S)
        if not ready:
            break  # who has not ended is found to hang
        for pipe in ready:
            try:
                said.append(pipe.recv())  # type: ignore[union-attr]
            except EOFError:
                left.remove(pipe)  # type: ignore[arg-type]
    return said


def _moments() -> list[Any]:
    moments = random.Random(SEED)
    kinds = ["2", "3", "fsdp", "0", "3", "fsdp-file", "1", "2", "fsdp", "3", "2", "fsdp-file", "fabric3", "fabric2"]
    kinds += ["3-async", "fsdp-async", "2-meanwhile", "fsdp-meanwhile", "3-meanwhile"]
    victims = [(0, (0, 1)), (0, (0, 1)), (1, (1,)), (0, (0,))]
    cells = [(kind, moments.random(), *victims[index % 4]) for index, kind in enumerate(kinds)]
    return [pytest.param(*cell, marks=pytest.mark.thorough if cell[0] == "fabric2" else ()) for cell in cells]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(("kind", "kill_at", "counts", "kills"), _moments())
def test_a_kill_leaves_the_old_or_the_new_checkpoint(
    processes: ForkServerContext,
    ranks2: Any,
    tmp_path: Path,
    kind: str,
    kill_at: float,
    counts: int,
    kills: tuple[int, ...],
) -> None:
    path = tmp_path / "checkpoints" / "last.ckpt"
    if kind == "fsdp-file" and counts == 1:
        counts = 0  # rank 1 writes nothing
    said, codes = run_job(processes, saving.Job(kind, str(path), kill_at, counts, kills), tmp_path)
    digests = {step: bits for what, step, bits in said if what == "saving"}
    events = max(count for what, step, count in said if what == "saved" and step == 2)
    print(f"{kind}: ranks {kills} killed at {kill_at:.2f} of {events} events; left: {sorted(os.listdir(path.parent))}")
    assert max(digests) == 3 and all(codes[rank] == -signal.SIGKILL for rank in kills)
    assert all(codes), "the other rank ended with an error"
    if kind.endswith("-meanwhile"):
        assert ("training", 3, 0) in said and not any(what == "saved" and step == 3 for what, step, _ in said)
    for step, bits in ranks2.run(saving.load, kind, str(path)):
        assert step in (2, 3) and bits == digests[step]
    # The next save removes what is left.
    assert set(os.listdir(path.parent)) <= {"last.ckpt", ".last.ckpt.saving", ".last.ckpt.previous"}
    atomic.prepare(path)
    assert os.listdir(path.parent) == ["last.ckpt"]
    for _, bits in ranks2.run(saving.load, kind, str(path)):
        assert bits in digests.values()
