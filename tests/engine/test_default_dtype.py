"""In `bf16-true` a user's new tensors are of bf16, as under DDP; those of a step, and of the audit, are of fp32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_zeroplus as zp
from lightning_zeroplus.callbacks.audit.ledger import Ledger
from tests.programs.base import Manual, step
from tests.programs.run import pairs
from tests.support.training import trainer


class _Notes(torch.optim.SGD):
    """Notes the default dtype of each step, that of upstream's first one included."""

    noted: set[torch.dtype] = set()

    def step(self, closure: Any = None) -> Any:
        self.noted.add(torch.get_default_dtype())
        return super().step(closure)


class _Module(Manual):
    """A layer is unfrozen: within a forward the optimizer is built anew."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        assert torch.get_default_dtype() == torch.bfloat16
        self.manual_backward(self.loss(batch))
        step(self.optimizers())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx > 0)  # type: ignore[index]

    def configure_optimizers(self) -> Any:
        return _Notes(self.parameters(), 0.1)


def _noted(stage: int) -> set[torch.dtype]:
    _Notes.noted = set()
    generator = torch.Generator().manual_seed(0)
    batches = DataLoader([pairs(generator, 4) for _ in range(3)], batch_size=None)  # type: ignore[arg-type]
    trainer(zp.ZeroPlusStrategy(stage=stage), precision="bf16-true", max_epochs=1).fit(_Module(), batches)
    return _Notes.noted


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_run_in_fp32(ranks2: Any, stage: int) -> None:
    assert ranks2.run(_noted, stage) == [{torch.float32}] * 2


@pytest.fixture
def in_bf16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_bf16")
def test_the_audit_compares_in_fp32() -> None:
    entry = Ledger(lambda: 1.0, torch.device("cpu")).entry("without a gradient", (2, 3))
    assert entry.total.dtype == torch.float32 and not entry.total.any()
