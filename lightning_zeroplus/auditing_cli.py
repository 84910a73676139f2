"""Lightning's CLI with one more subcommand, ``audit``. Needs jsonargparse."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_zeroplus.callbacks.gradient_audit import GradientAudit


class AuditingTrainer(Trainer):
    """A Trainer with an ``audit`` method, which fits a few steps and checks their gradients."""

    def audit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        steps: int = 2,
        tolerance: float | None = None,
        parameters: str = "*",
    ) -> None:
        """Compare the gradients that the optimizer consumes with the gradients that the backwards compute.

        Fits a few steps as ``fit`` does, without validation and checkpoints, prints a table, and stops.

        Args:
            model: The module.
            train_dataloaders: As for ``fit``.
            val_dataloaders: Not used.
            datamodule: As for ``fit``.
            steps: Optimizer steps to audit.
            tolerance: The largest error of a parameter; null: the error that rounding in the dtypes explains.
            parameters: Shell pattern for the names of the parameters to audit.

        Raises:
            GradientMismatchError: If gradients differ.
            MisconfigurationException: If no optimizer step was made.
        """
        auditor = GradientAudit(steps, tolerance, parameters)
        callbacks: list[Callback] = self.callbacks  # type: ignore[has-type]  # set by a connector of the Trainer
        kept = [each for each in callbacks if not isinstance(each, (Checkpoint, SaveConfigCallback))]
        self.callbacks = [*kept, auditor, _StopsAfter(auditor)]
        self.limit_val_batches = self.num_sanity_val_steps = 0
        self.fit(model, train_dataloaders, None, datamodule)
        if not auditor.audited_steps:
            raise MisconfigurationException(
                "`audit` saw no optimizer step. Check `trainer.max_steps`, `trainer.limit_train_batches` and the"
                " size of the data."
            )


class _StopsAfter(Callback):
    def __init__(self, auditor: GradientAudit) -> None:
        self.auditor = auditor

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.should_stop or self.auditor.finished


class SaveConfigWithLogs(SaveConfigCallback):
    """Saves the config next to the logs, and nothing without a logger: it would go to the working directory."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


class AuditingCLI(LightningCLI):
    """``fit``, ``validate``, ``test``, ``predict`` and ``audit``."""

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        subcommands = LightningCLI.subcommands()
        return subcommands | {"audit": subcommands["fit"]}
