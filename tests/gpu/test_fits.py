"""Whole fits on real GPUs with NCCL: windows, offload, resumes and callbacks, with the CPU's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_zeroplus.testing import RankPool
from tests.testing.simulated_cuda.jobs import Job, run
from tests.testing.simulated_cuda.test_fits import JOBS, STRATEGIES, name_of

#: fp32 sums in the order of a GPU's kernels, over three or five steps.
_BOUND = 1e-5


@pytest.mark.parametrize("job", JOBS, ids=name_of)
def test_a_fit_is_that_of_the_cpu(job: Job, gpu_ranks: RankPool, ranks2: RankPool) -> None:
    expected = ranks2.run(run, job, "cpu")
    first, second = gpu_ranks.run(run, job, "cuda")
    for got, want in zip((first, second), expected, strict=True):
        assert got.moved > 1e-3, "the weights must have moved"
        torch.testing.assert_close(got.weights, want.weights, rtol=_BOUND, atol=_BOUND)
    if not job.batch_norm:  # whose averages are each rank's own
        assert torch.equal(first.weights, second.weights)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_low_precision(strategy: int | str, precision: str, gpu_ranks: RankPool) -> None:
    """fp32 within what 8 or 11 bits of each activation and gradient leave."""
    loop: Any = "automatic" if (strategy, precision) == ("fsdp", "16-mixed") else "plain"
    config = (("fp16", {"loss_scale": 128}),) if precision == "16-mixed" and strategy != "fsdp" else ()
    first, second = gpu_ranks.run(run, Job(strategy, loop, precision=precision, config=config), "cuda")
    assert first.moved > 1e-3 and torch.equal(first.weights, second.weights)
    exact, _ = gpu_ranks.run(run, Job(strategy, loop), "cuda")
    assert float((first.weights - exact.weights).abs().max()) < 0.05 * exact.moved + 4e-3 * exact.weights.abs().max()


@pytest.mark.parametrize("strategy", [0, 2, 3])
def test_a_cached_loss_replays_the_dropout_of_the_device(strategy: int, gpu_ranks: RankPool) -> None:
    first, second = gpu_ranks.run(run, Job(strategy, "cached", dropout=0.5, callbacks=("GradientAudit",)), "cuda")
    assert first.moved > 1e-3 and torch.equal(first.weights, second.weights)
