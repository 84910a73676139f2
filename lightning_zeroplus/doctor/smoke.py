"""Two processes on this machine: the collectives of gloo, and ZeRO steps with audited gradients."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zeroplus.callbacks.gradient_audit import GradientAudit
from lightning_zeroplus.doctor.finding import Finding
from lightning_zeroplus.testing.ranks import RankError, RankPool

_STAGES = (2, 3)
_TIMEOUT_S = 120.0


def smoke_test() -> Iterator[Finding]:
    """Start two gloo ranks, try their collectives, and train two audited steps under stages 2 and 3 on the CPU.

    The CPU is enough to find what keeps processes from starting, connecting and reducing. GPUs are not used.
    """
    with RankPool(2, timeout=_TIMEOUT_S, initializer=_quiet) as ranks:
        try:
            start = time.monotonic()
            supported: dict[str, str | None] = ranks.run(_collectives)[0]
            took = time.monotonic() - start
        except RankError as error:
            yield Finding("smoke", "two processes", "problem", _first_line(error))
            return
        yield Finding("smoke", "two processes", "ok", f"started and reduced in {took:.1f} s")
        for name, reason in supported.items():
            yield Finding("smoke", f"gloo {name}", "unavailable" if reason else "native", reason or "")
        for stage in _STAGES:
            try:
                error_, backwards = ranks.run(_audited_fit, stage)[0]
            except RankError as error:
                yield Finding("smoke", f"stage {stage}", "problem", _first_line(error))
            else:
                detail = f"{backwards} backwards per step, gradients off by {error_:.0e} at most"
                yield Finding("smoke", f"stage {stage}", "ok", detail)


def _first_line(error: RankError) -> str:
    """The first rank's failure and its exception, without the traceback."""
    first = str(error).split("\n\n")[0].strip().splitlines()
    return f"{first[0]}: {first[-1].strip()}"


def _quiet() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # failures raise; output does not belong to the report
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _collectives() -> dict[str, str | None]:
    """For each collective, None or why it does not work. Unsupported ones raise before they send anything."""
    total = torch.full((4,), float(dist.get_rank() + 1))
    dist.all_reduce(total)
    if total.tolist() != [3.0] * 4:
        raise RuntimeError(f"an all-reduce of 1 and 2 gave {total.tolist()}")
    ones = torch.ones(4)
    attempts = {
        "reduce-scatter": (lambda: dist.reduce_scatter_tensor(ones[:2], torch.ones(4)), 2.0),
        "ReduceOp.AVG": (lambda: dist.all_reduce(ones.fill_(1), op=dist.ReduceOp.AVG), 1.0),
        "PREMUL_SUM": (lambda: dist.all_reduce(ones.fill_(1), op=dist._make_nccl_premul_sum(0.5)), 1.0),
    }
    return {name: _reason(attempt, ones, wanted) for name, (attempt, wanted) in attempts.items()}


def _reason(attempt: Callable[[], Any], result: Tensor, wanted: float) -> str | None:
    try:
        attempt()
    except (RuntimeError, ValueError, AttributeError) as error:
        return str(error).splitlines()[0]
    return None if float(result[0]) == wanted else f"gives {float(result[0])} instead of {wanted}"


class _Probe(pl.LightningModule):
    """Four backwards per step; one layer takes part in two of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for index, part in enumerate(batch.chunk(4)):
            hidden = self.first(part)
            self.manual_backward((self.second(hidden) if index % 2 else hidden).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _audited_fit(stage: int) -> tuple[float, int]:
    auditor = GradientAudit(steps=2)
    trainer = pl.Trainer(
        strategy=f"zeroplus_stage{stage}",
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=1,
        callbacks=[auditor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(_Probe(), DataLoader(data, batch_size=16))
    if auditor.audited_steps != 2:
        raise RuntimeError(f"{auditor.audited_steps} optimizer steps were audited instead of 2")
    return max(result.error for result in auditor.results), max(result.backwards[1] for result in auditor.results)
