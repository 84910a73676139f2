"""A cached loss replays dropout on the encoder's device, also if inputs and LightningModule are on the CPU."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import lightning_zeroplus as zp
from lightning_zeroplus.testing import RankPool


class _Encoder(nn.Module):
    """Moves its inputs to its own device."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(self.net[0].weight.device))


class _OnTheCPU(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._trainer: Any = SimpleNamespace(strategy=SimpleNamespace(model=None), precision_plugin=None)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def _loss(embeddings: Tensor) -> Tensor:
    return (embeddings @ embeddings.T).square().mean()


def _grads(kind: str) -> tuple[bool, float]:
    torch.manual_seed(0)
    encoder, x = _Encoder().to("cuda"), torch.randn(6, 8)
    encode = {"module": encoder, "method": encoder.forward, "partial": functools.partial(encoder.forward)}[kind]
    params = list(encoder.parameters())
    torch.manual_seed(1)
    zp.CachedLoss(_loss, chunk_size=2)(_OnTheCPU(), encode, x)
    got = [param.grad.cpu() for param in params]
    torch.manual_seed(1)
    want = torch.autograd.grad(_loss(torch.cat([encoder(part) for part in x.split(2)])), params)
    close = all(torch.allclose(a, b.cpu(), rtol=1e-5, atol=1e-7) for a, b in zip(got, want, strict=True))
    return close, float(want[0].cpu().norm())


@pytest.mark.parametrize("kind", ["module", "method", "partial"])
def test_dropout_of_the_encoders_device_is_replayed(cuda_ranks: RankPool, kind: str) -> None:
    for close, norm in cuda_ranks.run(_grads, kind):
        assert close and norm > 1e-3
