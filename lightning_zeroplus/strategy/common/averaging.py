"""Lightning's ``WeightAveraging`` callbacks where weights are sharded: they see whole weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import WeightAveraging

from lightning_zeroplus.gradients.patches.specialize import generalize, specialize
from lightning_zeroplus.weights.gathered import gathered

if TYPE_CHECKING:
    import lightning.pytorch as pl

_CURRENT = "current_model_state"


class _GatheringModel:
    """Mixin for the callback's ``AveragedModel``, which reads the module's weights when it updates its own."""

    def update_parameters(self, model: Any) -> None:
        with gathered(model):
            super().update_parameters(model)  # type: ignore[misc]


class _Gathering:
    """Mixin for a ``WeightAveraging`` callback: hooks that read or write the module's weights see whole weights."""

    def setup(self: Any, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)  # type: ignore[misc]
        if stage == "fit":
            specialize(self._average_model, _GatheringModel)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with gathered(pl_module):
            super().on_train_end(trainer, pl_module)  # type: ignore[misc]

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with gathered(pl_module):
            super().on_validation_epoch_start(trainer, pl_module)  # type: ignore[misc]

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with gathered(pl_module):
            super().on_validation_epoch_end(trainer, pl_module)  # type: ignore[misc]


class _GatheringNames(_Gathering):
    """The same where a checkpoint's ``state_dict`` has names only: the strategy saves and restores the weights."""

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)  # type: ignore[misc]
        if _CURRENT in checkpoint:
            checkpoint[_CURRENT] = {}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if checkpoint.get(_CURRENT) == {}:
            with gathered(pl_module):  # any values: the strategy will restore the weights
                checkpoint[_CURRENT] = {name: value.clone() for name, value in pl_module.state_dict().items()}
        super().on_load_checkpoint(trainer, pl_module, checkpoint)  # type: ignore[misc]


def gather_for_averaging(trainer: pl.Trainer, saves_parts: bool) -> list[Any]:
    """Let the averaging callbacks of ``trainer`` gather weights; returns these callbacks, for :func:`restore`.

    Args:
        trainer: The Trainer.
        saves_parts: The ``state_dict`` that the strategy saves has no weights: each rank saves its parts of them.
    """
    callbacks: list[Any] = [
        each
        for each in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(each, WeightAveraging) and not isinstance(each, _Gathering)
    ]
    for callback in callbacks:
        specialize(callback, _GatheringNames if saves_parts else _Gathering)
        if callback._average_model is not None:
            specialize(callback._average_model, _GatheringModel)
    return callbacks


def restore(callbacks: list[Any]) -> None:
    """Undo :func:`gather_for_averaging`."""
    while callbacks:
        callback = callbacks.pop()
        generalize(callback, _GatheringNames if isinstance(callback, _GatheringNames) else _Gathering)
        model = getattr(callback, "_average_model", None)
        if isinstance(model, _GatheringModel):
            generalize(model, _GatheringModel)
