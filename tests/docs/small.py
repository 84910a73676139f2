"""The module that the fragments train, its data, and what it must have become."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_zeroplus.testing import train_reference
from tests.support.training import relative_error, trainer, weights

#: Rows of a rank's batch.
ROWS = 16
STEPS = 2
#: Distance from the reference, relative to its update. One lost backward of eight costs 0.1 in the mean.
BOUNDS = {"32": 1e-5, "bf16": 5e-2}


class Small(pl.LightningModule):
    """Eight backwards before a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net: nn.Module | None = _net()

    def loss(self, x: Tensor) -> Tensor:
        assert self.net is not None
        return _loss(self.net, x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        for chunk in batch.chunk(8):
            self.manual_backward(self.loss(chunk))
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _optimizer(list(self.parameters()))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_data(self.global_rank), batch_size=ROWS)

    def on_train_end(self) -> None:
        params = list(self.parameters())
        if isinstance(params[0], DTensor):
            self.trained = torch.cat([p.detach().full_tensor().flatten() for p in params])  # type: ignore[attr-defined]
        else:
            self.trained = weights(self)  # type: ignore[arg-type]


class Encoded(Small):
    """The same, with another name for the network."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.net = self.net, None

    def loss(self, x: Tensor) -> Tensor:
        assert self.encoder is not None
        return _loss(self.encoder, x)

    def on_train_end(self) -> None:
        pass


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _loss(net: nn.Module, x: Tensor) -> Tensor:
    return net(x.to(next(net.parameters()).dtype)).float().square().mean()


def _optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.25)


def _data(rank: int) -> Tensor:
    return torch.randn(ROWS * STEPS, 8, generator=torch.Generator().manual_seed(1 + rank))


def check_trained(module: Small) -> None:
    """Compare ``module`` with what a single process trains without ZeRO."""
    error = error_of(module)
    assert error <= BOUNDS[str(module.trainer.precision).split("-")[0]], error


def error_of(module: Small) -> float:
    """Distance of the trained module from the reference, relative to its update."""
    batches = list(zip(*(_data(rank).split(ROWS) for rank in range(module.trainer.world_size)), strict=True))

    def pattern(net: nn.Module, batch: Tensor, backward: Any, index: int) -> None:
        for chunk in batch.chunk(8):
            backward(_loss(net, chunk))

    start = torch.cat([param.detach().flatten() for param in _net().parameters()])
    trained = train_reference(_net(), _optimizer, pattern, batches).params[-1]
    update = torch.cat([param.flatten() for param in trained]) - start
    return relative_error(module.trained.float().cpu() - start, update)


class OnCPUs(pl.Trainer):
    """A Trainer that takes the pool's processes for the GPUs that it is given, one epoch, and a copy of the module."""

    def __init__(self, **given: Any) -> None:
        off = (
            "logger",
            "enable_checkpointing",
            "enable_progress_bar",
            "enable_model_summary",
            "use_distributed_sampler",
        )
        here = {"accelerator": "cpu", "devices": dist.get_world_size(), "max_epochs": 1}
        super().__init__(**given | here | dict.fromkeys(off, False))

    def fit(self, model: Small, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        model = copy.deepcopy(model)
        super().fit(model, *args, **kwargs)
        check_trained(model)
        OnCPUs.fits += 1

    fits = 0


def fit(module: pl.LightningModule, strategy: Any, **kwargs: Any) -> None:
    """Fit ``module`` on the two ranks of the pool, for an epoch."""
    trainer(strategy, max_epochs=1, use_distributed_sampler=False, **kwargs).fit(module)
