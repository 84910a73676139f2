"""Fits under ``Trainer(accelerator="cuda")``: weights equal the CPU's with gloo, to the bit, and nothing races."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_zeroplus as zp
from lightning_zeroplus.testing import RankPool
from tests.support.training import trainer, zero_plus
from tests.testing.simulated_cuda.jobs import Job, Module, run

STRATEGIES: tuple[int | str, ...] = (0, 1, 2, 3, "fsdp")

#: By default: one fit of every kind.
_SAMPLE = [
    Job(0, batch_norm=True),
    Job(1, "window"),
    Job(2, batch_norm=True),
    Job(3, "window"),
    Job("fsdp"),
]
_OVERLAP = (("zero_optimization", {"overlap_comm": True, "reduce_bucket_size": 100}),)
_IN_LINE = (("zero_optimization", {"overlap_comm": False}),)
_REST = [
    *(Job(strategy, "automatic") for strategy in STRATEGIES),
    *(Job(strategy, "window") for strategy in (0, 2, "fsdp")),
    *(Job(strategy, "cached") for strategy in STRATEGIES),
    *(Job(strategy, batch_norm=True) for strategy in (1, 3)),
    *(Job(strategy, offload=True) for strategy in (2, 3)),
    Job("zeroplus_stage3_offload"),  # with weights that stay gathered
    *(Job(strategy, config=config) for strategy in (1, 2, 3) for config in (_OVERLAP, _IN_LINE)),
    *(Job(strategy, resume=other) for strategy, other in ((0, 3), (1, 2), (2, 0), (3, 1), (3, 3), ("fsdp", "fsdp"))),
    *(Job(strategy, callbacks=("GradientAudit", "ReductionMonitor")) for strategy in (0, 1, 2, 3)),
    Job("fsdp", callbacks=("GradientAudit",)),
]
JOBS = [*_SAMPLE, *_REST]


def name_of(job: Job) -> str:
    """Of a test."""
    parts = [str(job.strategy), job.loop]
    parts += [key for key in ("offload", "batch_norm") if getattr(job, key)]
    parts += [f"to {job.resume}"] if job.resume is not None else []
    parts += ["overlap" if job.config == _OVERLAP else "in line"] if job.config else []
    return " ".join([*parts, *job.callbacks])


def _cases() -> list[Any]:
    sample = [pytest.param(job, id=name_of(job)) for job in _SAMPLE]
    return [*sample, *(pytest.param(job, id=name_of(job), marks=pytest.mark.thorough) for job in _REST)]


@pytest.mark.parametrize("job", _cases())
def test_a_fit_is_that_of_the_cpu_and_nothing_races(job: Job, cuda_ranks: RankPool, ranks2: RankPool) -> None:
    expected = ranks2.run(run, job, "cpu")
    for got, want in zip(cuda_ranks.run(run, job, "cuda"), expected, strict=True):
        assert got.moved > 1e-3, "the weights must have moved"
        torch.testing.assert_close(got.weights, want.weights, rtol=0, atol=0)
        assert got.races == []
        assert got.counts["collectives"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [(strategy, precision) for strategy in STRATEGIES for precision in ("bf16-true", "bf16-mixed", "16-mixed")],
)
def test_low_precision(strategy: int | str, precision: str, cuda_ranks: RankPool) -> None:
    # Clipping by hand would see torch's scaled gradients; in automatic optimization Lightning unscales them before.
    loop = "automatic" if (strategy, precision) == ("fsdp", "16-mixed") else Job(strategy).loop
    first, second = cuda_ranks.run(run, Job(strategy, loop, precision=precision), "cuda")
    assert first.moved > 1e-3 and first.weights.isfinite().all()
    assert torch.equal(first.weights, second.weights)
    assert first.races == second.races == []


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", [0, 2, 3])
def test_a_cached_loss_replays_the_dropout_of_the_device(strategy: int, cuda_ranks: RankPool) -> None:
    first, second = cuda_ranks.run(run, Job(strategy, "cached", dropout=0.5, callbacks=("GradientAudit",)), "cuda")
    assert first.moved > 1e-3 and torch.equal(first.weights, second.weights)
    assert first.races == second.races == []


def _forward_dtypes(stage: int, precision: Any) -> list[torch.dtype]:
    """Of what the network gives: in a step of a fit in ``precision``, and in 32-true under a user's own autocast."""
    seen: list[torch.dtype] = []

    class Autocasts(Module):
        def training_step(self, batch: list[Tensor], index: int) -> Any:
            self.net.register_forward_hook(lambda *given: seen.append(given[-1].dtype))
            return super().training_step(batch, index)

    trainer(zero_plus(stage), accelerator="cuda", precision=precision, max_steps=1).fit(Autocasts(Job(stage, "window")))
    fabric = L.Fabric(accelerator="cuda", devices=2, strategy=zp.ZeroPlusFabricStrategy(stage))
    fabric.launch()
    net = nn.Linear(4, 4)
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    with torch.autocast("cuda", torch.bfloat16):
        out = model(torch.ones(2, 4, device=fabric.device))
    after = model(torch.ones(2, 4, device=fabric.device)).dtype
    fabric.strategy.teardown()  # else stage 3's linear layer stays for later tests, and keeps less for a backward
    return [*seen, out.dtype, after]


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_forward_runs_under_the_autocast_of_its_caller(stage: int, cuda_ranks: RankPool) -> None:
    """On a GPU, upstream's forward leaves it."""
    low, full = torch.bfloat16, torch.float32
    for *within, by_hand, without in cuda_ranks.run(_forward_dtypes, stage, "bf16-mixed"):
        assert within and set(within) == {low} and (by_hand, without) == (low, full)
