"""A LightningModule with all that makes resuming hard: frozen and tied parameters, groups, buffers, odd sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zeroplus as zp
from lightning_zeroplus.weights.partitioned.partition import is_partitioned

CLASSES = 5
SAMPLES = 48
GLOBAL_BATCH = 12  # for one, two and three ranks


class Tied(pl.LightningModule):
    """Sizes that no number of ranks divides; two parameter groups; a schedule per step; a running statistic."""

    def __init__(self, seed: int = 0, optimizer: str = "adamw", width: int = 7, sharded_init: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        if not sharded_init:
            self.build()

    def build(self) -> None:
        torch.manual_seed(self.hparams["seed"])
        width = self.hparams["width"]
        self.first = nn.Linear(CLASSES, width, bias=False)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, CLASSES)
        self.last = nn.Linear(width, CLASSES)
        self.last.weight = self.hidden.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def configure_model(self) -> None:
        if not hasattr(self, "first"):
            self.build()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.frozen(self.first(x))))
        return self.scale * (self.last(x) + torch.tanh(self.hidden(x)))

    def on_train_start(self) -> None:
        self.sizes = {name: 0 if is_partitioned(param) else param.numel() for name, param in self.named_parameters()}
        self.loaded = state(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        # By the step: Lightning resumes in the middle of an epoch, but with the loader's first batch.
        rank, world_size = self.global_rank, self.trainer.world_size
        chosen = (self.trainer.global_step * GLOBAL_BATCH + torch.arange(rank, GLOBAL_BATCH, world_size)) % SAMPLES
        x = samples()[chosen].to(self.first.weight.dtype)
        return nn.functional.cross_entropy(self(x).float(), x.argmax(1))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0].to(self.first.weight.dtype)
        self.log("loss", nn.functional.cross_entropy(self(x).float(), batch[1]), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        matrices = [self.first.weight, self.frozen.weight, self.hidden.weight]
        others = [p for p in self.parameters() if all(p is not m for m in matrices)]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0, "lr": 0.02},
        ]
        if self.hparams["optimizer"] == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, 0.05, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(groups, 0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def samples() -> Tensor:
    return torch.randn(SAMPLES, CLASSES, generator=torch.Generator().manual_seed(3))


def loader() -> DataLoader[Any]:
    """Four batches per epoch, for any number of ranks."""
    x = samples()
    world_size = torch.distributed.get_world_size()
    return DataLoader(TensorDataset(x, x.argmax(1)), batch_size=GLOBAL_BATCH // world_size)


def strategy(
    stage: int, offload: str | None = None, config: dict[str, Any] | None = None, **kwargs: Any
) -> zp.ZeroPlusStrategy:
    zero = {"stage3_param_persistence_threshold": 6, "reduce_bucket_size": 20, "sub_group_size": 40}
    config = {"zero_optimization": zero, **(config or {})}
    return zp.ZeroPlusStrategy(stage=stage, offload=offload, config=config, **kwargs)  # type: ignore[arg-type]


def trainer(strategy: Any, **kwargs: Any) -> pl.Trainer:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    defaults = {"accelerator": "cpu", "devices": torch.distributed.get_world_size(), "max_epochs": -1} | quiet
    return pl.Trainer(strategy=strategy, use_distributed_sampler=True, **(defaults | kwargs))


def state(module: Tied) -> dict[str, Tensor]:
    """Every weight (the fp32 master where there is one) and optimizer state, whole, by name, on every rank."""
    return {"seen": module.seen.float()} | engine_state(module.trainer.strategy.model)


def engine_state(engine: Any) -> dict[str, Tensor]:
    """:func:`state` of an engine."""
    from lightning_zeroplus.engine.state.parts import EngineState

    own = EngineState(engine)
    found: dict[str, Tensor] = {}
    numel = {name: torch.Size(shape).numel() for name, shape in own.shapes.items()}
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, [part._replace(data=part.data.clone()) for part in own.parts(True)])
    for name, key, start, data in (part for parts in gathered for part in parts):
        whole = found.setdefault(f"{name} {key}", torch.full((numel[name],), torch.nan))
        whole[start : start + data.numel()] = data.float()
    for slot in own.slots:
        if slot.group is not None:
            step = own.optimizer.state[slot.tensor].get("step", torch.zeros(()))
            found |= {f"{name} step": torch.as_tensor(float(step)) for name in slot.members}
    assert not any(value.isnan().any() for value in found.values())
    return found


def fit(
    made: zp.ZeroPlusStrategy, steps: int, path: Any = None, save: Any = None, **kwargs: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train to ``steps`` in all, from ``path`` if given, save to ``save`` if given.

    Returns:
        :func:`state` before the first step and at the end.
    """
    options = {key: kwargs.pop(key) for key in ("module", "weights_only") if key in kwargs}
    # Another seed, so that only the checkpoint can bring the right weights.
    module = options.pop("module", None) or Tied(seed=0 if path is None else 7)
    run = trainer(made, max_steps=steps, **kwargs)
    run.fit(module, loader(), ckpt_path=path, **options)
    if save is not None:
        run.save_checkpoint(save)
    return module.loaded, state(module)


def digest_of(path: Path) -> dict[str, bytes]:
    """Every file's content."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
