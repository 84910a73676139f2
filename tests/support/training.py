"""A small LightningModule, its data and its Trainer, for tests of the strategy that run on the ranks of a pool."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zeroplus as zp


class Classifier(pl.LightningModule):
    """Automatic optimization, metrics reduced over the ranks, a choice of schedulers."""

    def __init__(
        self, scheduler: str | None = "cosine", sharded_init: bool = False, seed: int = 0, optimizer: str = "sgd"
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        if not sharded_init:
            self.build()

    def build(self) -> None:
        torch.manual_seed(self.hparams["seed"])
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.build()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("val_acc", self.accuracy, on_epoch=True, sync_dist=True)
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        if self.hparams["optimizer"] == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        else:
            optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        lr_scheduler = torch.optim.lr_scheduler
        match self.hparams["scheduler"]:
            case "cosine":
                return [optimizer], [lr_scheduler.CosineAnnealingLR(optimizer, 20)]
            case "step":
                schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
            case "plateau":
                schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}
        return optimizer


class ManualClassifier(Classifier):
    """Manual optimization; tests override ``training_step``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(scheduler=None, **kwargs)
        self.automatic_optimization = False


#: Batches of :func:`loader`, on each of two ranks.
BATCHES = 4


def loader(samples: int = 32 * BATCHES, batch_size: int = 16) -> DataLoader[Any]:
    """The same ``samples`` on every rank; Lightning's sampler shares them out."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 8, generator=generator)
    y = (x @ torch.randn(8, 4, generator=torch.Generator().manual_seed(4))).argmax(1)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def zero_plus(stage: int, config: Mapping[str, Any] | None = None, **kwargs: Any) -> zp.ZeroPlusStrategy:
    """The strategy with small buckets, and with every parameter partitioned at stage 3, however small."""
    zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100}
    return zp.ZeroPlusStrategy(stage=stage, config={"zero_optimization": zero, **(config or {})}, **kwargs)


def accelerator() -> str:
    """The Trainer's: ``"cuda"`` on ranks that have GPUs, real or simulated, and so NCCL."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def device() -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if accelerator() == "cuda" else torch.device("cpu")


def everywhere(alone: bool = False) -> dict[str, Any]:
    """A Trainer's or Fabric's arguments for all ranks of the pool, which may be nodes that share a GPU.

    Without a pool: for two ranks.

    Args:
        alone: For this rank by itself.
    """
    here = 1 if alone else int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
    nodes = dist.get_world_size() // here if dist.is_initialized() and not alone else 1
    return {"accelerator": accelerator(), "devices": here, "num_nodes": nodes}


def trainer(strategy: Any, **kwargs: Any) -> pl.Trainer:
    """A quiet Trainer on the ranks of the pool."""
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    defaults = {**everywhere(), "max_epochs": 2, **quiet}
    return pl.Trainer(strategy=strategy, **(defaults | kwargs))


def fit(strategy: Any, module: Classifier | None = None, ckpt_path: str | None = None, **kwargs: Any) -> Classifier:
    """Fit ``module`` and return it."""
    module = module if module is not None else Classifier()
    trainer(strategy, **kwargs).fit(module, loader(), loader(64), ckpt_path=ckpt_path)
    return module


def weights(module: Classifier) -> Tensor:
    """All parameters of ``module.net``, gathered if they are partitioned, as one fp32 vector."""
    params = list(module.net.parameters())
    if not hasattr(params[0], "ds_id"):
        return torch.cat([p.detach().float().flatten().clone() for p in params])
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters(params):
        return torch.cat([p.detach().float().flatten().clone() for p in params])


def relative_error(got: Tensor, want: Tensor) -> float:
    """L2 distance over the norm of ``want``."""
    return float((got - want).norm() / want.norm())
