"""One Lightning checkpoint, which `zp.export` has written, used without our strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from torch import nn

import lightning_zeroplus as zp
from tests.programs.base import Manual, Regression, step
from tests.programs.program import program
from tests.programs.run import Run, make_strategy

_DDP = "ddp_find_unused_parameters_true"


def _exported(run: Run, trainer: pl.Trainer, **how: Any) -> Path:
    trainer.save_checkpoint(run.folder / "last.ckpt")
    zp.export(run.folder / "last.ckpt", run.folder / "one.ckpt", **how)
    trainer.strategy.barrier()
    return run.folder / "one.ckpt"


def _goes_on(run: Run, make: Any, strategy: Any = _DDP, **trainer: Any) -> pl.Trainer:
    """Two epochs, a file, and two more epochs of a new module under DDP."""
    path = _exported(run, run.fit(make(), max_epochs=2, **trainer), optimizer=True)
    return run.fit(make(), max_epochs=4, strategy=strategy, ckpt_path=path, **trainer)


class _Groups(Regression):
    """Groups in another order than the module's, a frozen parameter in one of them, a tie and a schedule."""

    def build(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
        net[2].weight = net[0].weight
        net[1].bias.requires_grad_(False)
        return net

    def configure_optimizers(self) -> Any:
        first, second, third, last = self.net  # type: ignore[misc]
        groups = [
            {"params": [last.bias, second.weight, second.bias, first.weight], "lr": 0.02},
            {"params": [third.bias, first.bias, last.weight]},
        ]
        optimizer = torch.optim.AdamW(groups, 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@program(on_three_ranks=True)
def exported_and_resumed_under_ddp(run: Run) -> None:
    """A fit goes on under DDP from the file that `zp.export(optimizer=True)` writes: groups, a tie, a schedule."""
    _goes_on(run, _Groups)


@program()
def exported_from_zero_to_fsdp_and_back(run: Run) -> None:
    """The file of a fit under ZeRO goes on under FSDP2, and the other way round."""
    other = "stage3" if run.strategy.startswith("fsdp") else "fsdp"
    _goes_on(run, _Groups, make_strategy(_DDP if run.strategy.startswith("ddp") else other))


@program()
def exported_with_several_optimizers(run: Run) -> None:
    """Two optimizers of different classes, in the file of which a fit goes on under DDP."""

    class Two(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            first, second = self.optimizers()
            self.manual_backward(self.loss(batch))
            step(first)
            step(second) if batch_idx % 2 else second.zero_grad()

        def configure_optimizers(self) -> Any:
            last, first = self.net[2], self.net[0]  # type: ignore[index]
            return torch.optim.Adam([last.bias, last.weight], 0.01), torch.optim.SGD(first.parameters(), 0.1, 0.9)

    _goes_on(run, Two)


@program()
def exported_with_an_average(run: Run) -> None:
    """`WeightAveraging` goes on under DDP, with the weights and the average."""
    _goes_on(run, _Groups, callbacks=[callbacks.EMAWeightAveraging(decay=0.8)])


class _Sized(Regression):
    def __init__(self, width: int, classes: tuple[str, ...] = ()) -> None:
        self.width = width
        super().__init__()
        self.save_hyperparameters()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, self.width), nn.BatchNorm1d(self.width), nn.Linear(self.width, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return super().training_step(batch, batch_idx)


@program()
def exported_and_rebuilt(run: Run) -> None:
    """`load_from_checkpoint` rebuilds the module with its hyperparameters, in a process without a strategy."""
    path = _exported(run, run.fit(_Sized(5, ("a", "b"))))
    rebuilt = _Sized.load_from_checkpoint(path)
    assert rebuilt.hparams == {"width": 5, "classes": ("a", "b")} and rebuilt.width == 5
    run.keep(**rebuilt.state_dict(), output=rebuilt.eval()(torch.ones(2, 8)))
