"""SIGTERM in the middle of a fit: Lightning's exception on all ranks, a checkpoint, and a fit that goes on from it.

Under DDP all ranks get the signal at the same moment: there Lightning's handler waits for the others.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.programs.base import Manual, Regression, step
from tests.programs.program import program
from tests.programs.run import Run


class _WithAdam(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.02)


class _Stops(pl.Callback):
    """Sends the signal once, to some ranks, when the hook ``at`` is called for the time ``number``."""

    def __init__(self, run: Run, at: str, number: int, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
        self.is_due = run.rank in ranks or run.strategy.startswith("ddp")
        self.number, self.calls = number, 0
        setattr(self, at, self.count)

    def count(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        if self.calls == self.number and self.is_due:
            os.kill(os.getpid(), signal.SIGTERM)


def _stopped(run: Run, module: pl.LightningModule, stops: _Stops, validated: int | None = 3, **trainer: Any) -> Any:
    """Fit until the signal stops it, with so many batches of validation; the path of what is saved then."""
    saves = OnExceptionCheckpoint(run.folder, "stopped")
    how = {"callbacks": [stops, saves], "enable_checkpointing": True, "max_epochs": 2, **trainer}
    with pytest.raises(SIGTERMException):
        run.fit(module, val=validated and run.loader(validated), **how)
    run.keep(stopped_at=run.trainers[-1].global_step, epoch=run.trainers[-1].current_epoch)
    return saves.ckpt_path


@program(on_three_ranks=True)
def sigterm_in_a_step(run: Run) -> None:
    """SIGTERM on all ranks within a training step; OnExceptionCheckpoint saves, and a new Trainer goes on."""
    path = _stopped(run, _WithAdam(), _Stops(run, "on_before_backward", 2))
    run.fit(_WithAdam(), val=run.loader(3), ckpt_path=path, max_epochs=2)


@program(on_three_ranks=True)
def sigterm_on_one_rank(run: Run) -> None:
    """SIGTERM on one rank, between its forward and its backward."""
    path = _stopped(run, _WithAdam(), _Stops(run, "on_before_backward", 3, (1,)))
    run.fit(_WithAdam(), val=run.loader(3), ckpt_path=path, max_epochs=2)


@program()
def sigterm_in_the_last_batch(run: Run) -> None:
    """SIGTERM in the last batch of the last epoch: the fit ends by Lightning's exception, and not as if nothing was."""
    path = _stopped(run, _WithAdam(), _Stops(run, "on_before_backward", 8, (1,)), None)
    run.fit(_WithAdam(), ckpt_path=path, max_epochs=3)


@program()
def sigterm_in_the_last_batch_of_an_epoch(run: Run) -> None:
    """SIGTERM in the last batch of an epoch: no further batch is trained."""
    path = _stopped(run, _WithAdam(), _Stops(run, "on_before_backward", 4, (0,)), None)
    run.fit(_WithAdam(), ckpt_path=path, max_epochs=2)


@program()
def sigterm_in_a_manual_loop(run: Run) -> None:
    """SIGTERM between two backwards of a manual loop, whose optimizer steps in the end; ModelCheckpoint saves."""

    class Twice(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.manual_backward(0.5 * self.loss(batch).square())
            step(self.optimizers())

    saves = ModelCheckpoint(run.folder, "saved", save_on_exception=True, save_top_k=1, monitor=None)
    stops = _Stops(run, "on_after_backward", 3, (0,))
    with pytest.raises(SIGTERMException):
        run.fit(Twice(), callbacks=[stops, saves], enable_checkpointing=True, max_epochs=2)
    run.keep(stopped_at=run.trainers[-1].global_step)
    (path,) = [path for path in run.folder.iterdir() if "saved" in path.name]
    run.fit(Twice(), ckpt_path=path, max_epochs=2)


@program()
def sigterm_in_validation(run: Run) -> None:
    """SIGTERM in the last batch of a validation."""
    path = _stopped(run, _WithAdam(), _Stops(run, "on_validation_batch_start", 3, (1,)), val_check_interval=2)
    run.fit(_WithAdam(), val=run.loader(3), ckpt_path=path, max_epochs=2, val_check_interval=2)


@program()
def sigterm_early_in_validation(run: Run) -> None:
    """SIGTERM in the first batch of a validation in mid-epoch, which ours completes; it logs nothing."""

    class Quiet(_WithAdam):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    path = _stopped(run, Quiet(), _Stops(run, "on_validation_batch_start", 1, (1,)), val_check_interval=2)
    run.fit(Quiet(), val=run.loader(3), ckpt_path=path, max_epochs=2, val_check_interval=2)
