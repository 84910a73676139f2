"""Callbacks of Lightning that refuse every ``DeepSpeedStrategy``, for reasons that do not hold here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    stochastic_weight_avg,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import nn


class _Finetunes(BaseFinetuning):
    """Allows finetuning: our optimizer takes new parameters during a fit, and when the fit is resumed."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        try:
            super().setup(trainer, pl_module, stage)
        except NotImplementedError as error:  # the refusal is the last statement of the method
            if "DeepSpeed strategy" not in str(error):
                raise

    def restore_groups(self, trainer: pl.Trainer, trained: set[nn.Parameter]) -> None:
        """Add the saved groups, before the optimizer's state is loaded. The base class adds them at the fit's start."""
        if self._restarting:
            named = dict(trainer.lightning_module.named_parameters())
            for index, saved in self._internal_optimizer_metadata.items():
                optimizer = trainer.optimizers[index]
                # The base class replaces all groups. The first ones come from `configure_optimizers`, and stay.
                for group in self._apply_mapping_to_param_groups(saved, named)[len(optimizer.param_groups) :]:
                    trained.update(group["params"])  # they may be frozen again
                    optimizer.add_param_group(group)
            self._restarting = False


class _Schedules(GradientAccumulationScheduler):
    """Allows a schedule: our accumulation boundary is the optimizer step, whenever it comes."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        try:
            super().on_train_start(trainer, pl_module)
        except RuntimeError as error:  # after it the method has only the check below
            if "changing between epochs" not in " ".join(str(error).split()):
                raise
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"`Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})` and the callback"
                " `GradientAccumulationScheduler` were given. Remove one of them."
            )


class _Averages(StochasticWeightAveraging):
    """Allows averaging: our module's weights are whole between steps, or are gathered when they are read."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        with _no_deepspeed_strategy():
            super().setup(trainer, pl_module, stage)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        if trainer.fit_loop._skip_backward:
            rank_zero_warn(
                "This epoch computes the statistics of BatchNorm for the averaged weights. At its end Lightning's"
                " `StochasticWeightAveraging` steps with the gradients of the epoch before. ZeRO has released them, so"
                " this step does not change the averaged weights."
            )
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()


@contextmanager
def _no_deepspeed_strategy() -> Iterator[None]:
    """Hide ``DeepSpeedStrategy`` from the module of ``StochasticWeightAveraging`` within."""
    known: Any = vars(stochastic_weight_avg)
    strategy, known["DeepSpeedStrategy"] = known["DeepSpeedStrategy"], ()
    try:
        yield
    finally:
        known["DeepSpeedStrategy"] = strategy


_ALLOWED: dict[type[Callback], type[Callback]] = {
    BaseFinetuning: _Finetunes,
    GradientAccumulationScheduler: _Schedules,
    StochasticWeightAveraging: _Averages,
}


def allow(trainer: pl.Trainer) -> list[tuple[Any, type]]:
    """Let these callbacks of ``trainer`` run under ZeRO; return the argument of :func:`forbid_again`."""
    allowed = []
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        for refuses, runs in _ALLOWED.items():
            cls = type(callback)
            if issubclass(cls, refuses) and not issubclass(cls, runs):
                # In the MRO right before the class that refuses, after all classes of the user.
                bases = (runs,) if cls is refuses else (cls, runs)
                names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}  # for the key of its state
                callback.__class__ = type(cls.__name__, bases, names)
                allowed.append((callback, cls))
    return allowed


def restore_groups(trainer: pl.Trainer, trained: set[nn.Parameter]) -> None:
    """Add the parameter groups that a resumed callback had added. Called before the optimizer's state is loaded.

    Args:
        trainer: The Trainer, whose strategy has set up its optimizers.
        trained: A set to which the parameters of these groups are added: they have a state in the checkpoint.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _Finetunes):
            callback.restore_groups(trainer, trained)


def forbid_again(allowed: list[tuple[Any, type]]) -> None:
    """Undo :func:`allow`."""
    while allowed:
        callback, cls = allowed.pop()
        callback.__class__ = cls
