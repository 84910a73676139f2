"""Buffers that a forward updates, and parameters without dimensions: as under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_zeroplus as zp
from tests.matrix.cells import Cell
from tests.support.training import Classifier, loader, relative_error, trainer, weights, zero_plus
from tests.support.upstream import lightnings_strategy


class _Net(nn.Module):
    """A codebook that is a moving average, running statistics, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)
        self.temperature = nn.Parameter(torch.tensor(0.1))
        self.register_buffer("codebook", torch.randn(5, 16))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        nearest = torch.cdist(x, self.codebook).argmin(1)
        quantized = x + (self.codebook[nearest] - x).detach()
        if self.training:
            with torch.no_grad():
                for code in range(len(self.codebook)):
                    chosen = x[nearest == code]
                    if len(chosen):  # as a new tensor, and past autograd's eyes
                        self.codebook = self.codebook.clone()
                        self.codebook[code] = 0.5 * self.codebook[code] + 0.5 * chosen.mean(0)
                self.calls += 1
                self.flags[int(self.calls) % 3] = True
        return self.last(quantized + self.codebook[nearest] * x) * self.temperature.exp()


class _Module(Classifier):
    """Records the loss of every batch, for which the buffers count."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(scheduler=None, **kwargs)
        self.losses: list[float] = []

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = _Net()

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.loss(batch)


def _state(module: _Module) -> Tensor:
    buffers = [buffer.double().flatten() for buffer in module.net.buffers()]
    return torch.cat([weights(module).double(), *buffers, torch.tensor(module.losses, dtype=torch.float64)])


def _fit(strategy: Any, accumulate: int, folder: str | None = None) -> Tensor:
    module = _Module(sharded_init=getattr(strategy, "stage", 0) == 3)
    run = trainer(strategy, max_epochs=1, val_check_interval=2, accumulate_grad_batches=accumulate)
    run.fit(module, loader(), loader(64))
    if folder is not None:
        run.save_checkpoint(Path(folder, "last.ckpt"))
        run.validate(module, loader(64), ckpt_path=str(Path(folder, "last.ckpt")), verbose=False)
    return _state(module)


def _against_ddp(stage: int, accumulate: int, kwargs: dict[str, Any], folder: str) -> float:
    expected = _fit("ddp", accumulate)
    found = _fit(zero_plus(stage, **kwargs), accumulate, folder)
    validated = found[len(expected) :]
    assert len(validated) == 2 and torch.allclose(validated, expected[-2:], rtol=1e-6)  # the last batches again
    return relative_error(found[: len(expected)], expected)


@pytest.mark.sampled
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_buffers_and_scalars_are_ddps(ranks2: Any, stage: int, accumulate: int, tmp_path: Path) -> None:
    """Every loss, of training and of validation, every weight and every buffer, on every rank."""
    for kwargs in ({}, {"reduction": "step"}, {"offload": "cpu"})[: 3 if stage in (2, 3) else 2]:
        assert max(ranks2.run(_against_ddp, stage, accumulate, kwargs, str(tmp_path))) <= 1e-6


def _upstream() -> tuple[Tensor, str]:
    """The buffers after three steps without a scalar, and what is said about one."""
    module = _NoScalar()
    trainer(lightnings_strategy(Cell(2, "single")), max_epochs=1, limit_train_batches=3).fit(module, loader())
    with pytest.raises(RuntimeError) as error:
        trainer(lightnings_strategy(Cell(2, "single")), max_epochs=1).fit(_Module(), loader())
    return module.net.codebook, str(error.value)


def test_upstreams_buffers_part_and_scalars_fail(ranks2: Any) -> None:
    (first, message), (second, _) = ranks2.run(_upstream)
    assert (first - second).abs().max() > 0.01
    assert "self.dim() cannot be 0 to view Float as Byte" in message


class _NoScalar(_Module):
    def build(self) -> None:
        super().build()
        self.net.temperature = nn.Parameter(torch.full((1,), 0.1))


def _fsdp(strategy: Any, accumulate: int) -> Tensor:
    module = _NoScalar()
    run = trainer(strategy, max_epochs=1, val_check_interval=2, accumulate_grad_batches=accumulate)
    run.fit(module, loader(), loader(64))
    params = [getattr(p, "full_tensor", lambda p=p: p)().detach().double().flatten() for p in module.net.parameters()]
    buffers = [buffer.double().flatten() for buffer in module.net.buffers()]
    return torch.cat([*params, *buffers, torch.tensor(module.losses, dtype=torch.float64)])


def _fsdp_against_ddp(accumulate: int, reduction: str) -> float:
    strategy = zp.ZeroPlusFSDPStrategy(reduction=reduction)
    return relative_error(_fsdp(strategy, accumulate), _fsdp("ddp", accumulate))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("reduction", ["backward", "step"])
def test_buffers_under_fsdp2(ranks2: Any, accumulate: int, reduction: str) -> None:
    assert max(ranks2.run(_fsdp_against_ddp, accumulate, reduction)) <= 1e-6
