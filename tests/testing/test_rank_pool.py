"""The rank pool: results, failures, hangs and deaths, each followed by a run that works."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_zeroplus.testing import RankError, RankPool
from tests.support.forkserver import fork_server


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout=60, mp_context=fork_server()) as ranks:
        yield ranks


def _sum_of_ranks(value: int) -> tuple[int, torch.Tensor]:
    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor


def _works(pool: RankPool) -> bool:
    return pool.run(_sum_of_ranks, 10) == [(0, torch.tensor([21])), (1, torch.tensor([21]))]


def _fails_on(rank: int, message: str) -> None:
    if dist.get_rank() == rank:
        raise KeyError(message)
    dist.barrier()


def _fails_everywhere() -> None:
    raise KeyError("everywhere")


def _dies_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _hangs_on(rank: int) -> None:
    if dist.get_rank() == rank:
        _waits_for_nobody()


def _waits_for_nobody() -> None:
    while True:
        time.sleep(0.1)


def _pid() -> int:
    return os.getpid()


def test_results_come_in_rank_order(pool: RankPool) -> None:
    assert _works(pool)


def test_ranks_are_reused(pool: RankPool) -> None:
    assert pool.run(_pid) == pool.run(_pid)


def test_a_failing_rank_is_shown_first_though_the_other_waits(pool: RankPool) -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(_fails_on, 1, "planned")
    assert time.monotonic() - started < 30, "the failure must not wait for the collective's time limit"
    first, _, rest = str(caught.value).partition("\n\nrank 0")
    assert first.startswith("rank 1 raised") and "KeyError: 'planned'" in first
    assert rest
    assert _works(pool)


def test_a_failure_everywhere(pool: RankPool) -> None:
    with pytest.raises(RankError, match="KeyError: 'everywhere'"):
        pool.run(_fails_everywhere)
    assert _works(pool)


def test_a_killed_rank(pool: RankPool) -> None:
    with pytest.raises(RankError, match="^rank 0 died with exit code -9"):
        pool.run(_dies_on, 0)
    assert _works(pool)


def test_a_hanging_rank_is_shown_with_its_stack(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 did not answer in time(.|\n)*_waits_for_nobody"):
        pool.run(_hangs_on, 1, timeout=5)
    assert _works(pool)


def _fits_then_fails_on(rank: int) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(strategy="ddp", accelerator="cpu", devices=2, max_steps=1, **quiet).fit(BoringModel())  # type: ignore[arg-type]
    if dist.get_rank() == rank:
        raise KeyError("after a fit")
    _waits_for_nobody()


def test_a_rank_that_hangs_after_a_fit_is_shown_with_its_stack(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 did not answer after the failure above(.|\n)*_waits_for_nobody"):
        pool.run(_fits_then_fails_on, 0)
    assert _works(pool)


@pytest.mark.slow
def test_no_process_is_left() -> None:
    with RankPool(2) as pool:  # spawned, as by default
        pids = pool.run(_pid)
        assert _works(pool)
        assert all(map(psutil.pid_exists, pids))
    assert not any(map(psutil.pid_exists, pids))


def test_a_world_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="`world_size` must be an integer of at least 1, not 0"):
        RankPool(0)


def test_ranks_are_not_forked_from_a_process_that_computes() -> None:
    with pytest.raises(ValueError, match="`mp_context` must be None, or the result .* inherit its process group"):
        RankPool(2, mp_context=multiprocessing.get_context("fork"))
