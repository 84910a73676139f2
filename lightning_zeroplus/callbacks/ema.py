"""EMA: an exponential moving average of the weights, sharded like them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_zeroplus.callbacks.averaging.shards import (
    Shards,
    ShardsOfEngine,
    ShardsOfFSDP,
    Values,
    WholeShards,
    slices,
)
from lightning_zeroplus.checkpoint.names import AVERAGES
from lightning_zeroplus.checkpoint.places.address import Address, Files
from lightning_zeroplus.strategy.deepspeed.trainer import ZeroPlusStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


class EMA(Callback):
    """Keeps an exponential moving average of the weights, validates with it, and lets ``zp.export`` write it.

    The average begins as the weights with which the fit begins. Update number ``n``, from 1 on, is ``average = d *
    average + (1 - d) * weights`` with ``d = min(decay, (1 + n) / (warmup + n))``. It is the average that DDP gives.

    Each rank averages the shard that it updates, in fp32 or wider: of the fp32 master weights if there are any.
    Training gathers nothing for it. Frozen parameters are averaged too, in case they are unfrozen; buffers are not.

    - Validation in a fit uses the average. Then training continues with the weights. If validation raises, the module
      is left with the average.
    - Checkpoints have both. A fit is resumed with both, at any stage and with any number of ranks.
    - ``zp.export`` writes the average. ``trainer.test`` and ``trainer.predict`` use the weights: give them the exported
      file.

    It works with ``ZeroPlusStrategy``, ``ZeroPlusFSDPStrategy``, DDP and a single device. A checkpoint without
    optimizer states (``save_weights_only``) has the weights only.

    Args:
        decay: From 0, which copies the weights, to 1.
        every_n_steps: Update after every so many optimizer steps.
        warmup: How slowly ``decay`` is reached; 10 is usual. 0: from the first update on.

    Raises:
        ValueError: If an argument is out of range; when a fit is resumed, if the checkpoint lacks the average.
        MisconfigurationException: At the start of a fit, if the strategy has unknown shards.

    Attributes:
        updates: How many updates there were, also before the fit was resumed.

    Example::

        Trainer(strategy="zeroplus_stage3", callbacks=[zp.EMA(0.999, warmup=10)]).fit(module)
    """

    def __init__(self, decay: float, every_n_steps: int = 1, warmup: float = 0) -> None:
        if not _is_number(decay) or not 0 <= decay <= 1:
            raise ValueError(f"zp.EMA(decay={decay!r}): give a number from 0 to 1.")
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ValueError(f"zp.EMA(every_n_steps={every_n_steps!r}): give a positive integer.")
        if not _is_number(warmup) or not 0 <= warmup < math.inf:
            raise ValueError(f"zp.EMA(warmup={warmup!r}): give a number of at least 0.")
        self.decay, self.every_n_steps, self.warmup = decay, every_n_steps, warmup
        self._reset()

    def _reset(self) -> None:
        self.updates = self._latest = 0
        self._shards: Shards | None = None
        self._averages: Values = {}
        self._weights: Values = {}
        self._is_resumed = False
        self._saved: dict[str, Tensor] | Files | None = None

    # -- the fit ------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._reset()
        if not isinstance(
            trainer.strategy, (ZeroPlusStrategy, ModelParallelStrategy, DDPStrategy, SingleDeviceStrategy)
        ):
            raise MisconfigurationException(
                f"`EMA` does not know how `{type(trainer.strategy).__name__}` shards weights. Use `zeroplus_stage0` to"
                " `zeroplus_stage3`, `zeroplus_fsdp`, or `ddp`."
            )

    @override
    @torch.no_grad()
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        if isinstance(strategy, ZeroPlusStrategy):
            self._shards = ShardsOfEngine(strategy.model)  # type: ignore[arg-type]
        else:
            is_sharded = isinstance(strategy, ModelParallelStrategy)
            self._shards = ShardsOfFSDP(pl_module) if is_sharded else WholeShards(pl_module)
        self._averages = {
            (name, start): data.to(torch.promote_types(data.dtype, torch.float32), copy=True)
            for name, start, data in self._shards.read()
            if data.is_floating_point() or data.is_complex()
        }
        if self._is_resumed:
            self._resume(self._shards)
        self._latest = trainer.global_step
        self._show(strategy)

    def _resume(self, shards: Shards) -> None:
        if self._saved is None:
            raise ValueError("The checkpoint has the state of an `EMA`, and no average. Resume without `EMA`.")
        if isinstance(self._saved, (Path, Address)):
            shards.load(self._saved, self._averages)
        else:
            slices(self._saved, shards, self._averages)
        self._saved = None

    def _show(self, strategy: Any) -> None:
        if isinstance(strategy, ZeroPlusStrategy):
            strategy.model.averages = self._averages  # type: ignore[union-attr]

    @override
    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        before, self._latest = self._latest, trainer.global_step
        if self._shards is None or self._latest // self.every_n_steps == before // self.every_n_steps:
            return
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (self.warmup + self.updates))
        followed = self._shards.follow(self._averages)
        if followed is not self._averages:
            self._averages = followed
            self._show(trainer.strategy)
        for name, start, data in self._shards.read():
            average = self._averages.get((name, start))
            if average is not None:
                average.mul_(decay).add_(data.to(average.dtype), alpha=1 - decay)

    # -- validation ---------------------------------------------------------------------------------------------------

    @override
    @torch.no_grad()
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            self._warn("validate")
        elif self._shards is not None:
            self._averages = self._shards.follow(self._averages)
            self._show(trainer.strategy)
            self._weights = {(name, start): data.clone() for name, start, data in self._shards.read()}
            self._shards.write(self._averages)

    @override
    @torch.no_grad()
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        weights, self._weights = self._weights, {}
        if weights and self._shards is not None:
            self._shards.write(weights)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._warn("test")

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._warn("predict")

    def _warn(self, what: str) -> None:
        rank_zero_warn(
            f"`trainer.{what}` uses the weights, not the average of `EMA`. For the average, write it with"
            f' `lightning_zeroplus.export(checkpoint, "model.safetensors")`, and pass that file as `ckpt_path`.'
        )

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.updates, self._is_resumed = state_dict["updates"], True

    @override
    @torch.no_grad()
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not isinstance(self._shards, WholeShards):
            return  # an engine: the strategy saves its averages
        is_folder = getattr(trainer.strategy, "_save_distributed_checkpoint", False)
        if isinstance(self._shards, ShardsOfFSDP) and is_folder and checkpoint["optimizer_states"]:
            checkpoint["optimizer_states"][0][AVERAGES] = self._shards.as_tensors(self._averages)
        else:
            checkpoint[AVERAGES] = self._shards.whole(self._averages)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._saved = checkpoint.get(AVERAGES)
        if self._saved is None and trainer.ckpt_path is not None:
            # What the strategy has opened: another job may save to the same address.
            opened: Files | None = getattr(trainer.strategy, "opened", None)
            path = Path(trainer.strategy.broadcast(trainer.ckpt_path)) if opened is None else opened
            self._saved = path if path.is_dir() else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
