"""Lightning's callbacks, and users' own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from torch import nn

import lightning_zeroplus as zp
from tests.programs.base import Regression
from tests.programs.program import Refusal, program
from tests.programs.run import Run


class _WithAdam(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


@program(on_three_ranks=True)
def model_checkpoint_and_resume(run: Run) -> None:
    """ModelCheckpoint keeps the last; a new module resumes from it, with its optimizer and schedule."""

    class Scheduled(_WithAdam):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    saves = callbacks.ModelCheckpoint(run.folder, filename="last", save_last=False, save_top_k=1)
    run.fit(Scheduled(), callbacks=[saves], enable_checkpointing=True, max_epochs=2)
    run.fit(Scheduled(), ckpt_path=saves.best_model_path, max_epochs=4)


@program()
def best_of_three(run: Run) -> None:
    """ModelCheckpoint keeps the best by a validation metric, which `validate` loads."""
    saves = callbacks.ModelCheckpoint(run.folder, monitor="val_loss", save_top_k=1)
    module = _WithAdam()
    trainer = run.fit(module, val=run.loader(2), callbacks=[saves], enable_checkpointing=True, max_epochs=3)
    run.keep(best=trainer.validate(module, run.loader(3), ckpt_path="best", verbose=False)[0]["val_loss"])
    run.keep(score=saves.best_model_score)


@program()
def early_stopping(run: Run) -> None:
    """EarlyStopping ends the fit once a metric no longer falls enough."""
    stops = callbacks.EarlyStopping("val_loss", min_delta=0.02, patience=1)
    trainer = run.fit(_WithAdam(), val=run.loader(2), callbacks=[stops], max_epochs=12)
    run.keep(epochs=trainer.current_epoch)


@program(trainer={"callbacks": [callbacks.LearningRateMonitor("step")], "max_epochs": 2})
class learning_rate_monitor(Regression):
    """LearningRateMonitor, with a schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@program(
    refused={"fsdp*": Refusal("RuntimeError", r"param\.data = tensor\.clone")},
    on_three_ranks=True,
)
def pruning(run: Run) -> None:
    """ModelPruning zeroes the smallest weights, and lets the others have the memory of the first ones."""
    prunes = callbacks.ModelPruning("l1_unstructured", amount=0.3, use_global_unstructured=False)
    run.fit(_WithAdam(), callbacks=[prunes], max_epochs=2)


@program()
def pruning_alone(run: Run) -> None:
    """ModelPruning without a lottery ticket: it zeroes the smallest weights."""
    prunes = callbacks.ModelPruning(
        "l1_unstructured", amount=0.3, use_global_unstructured=False, use_lottery_ticket_hypothesis=False
    )
    run.fit(_WithAdam(), callbacks=[prunes], max_epochs=2)


@program()
def weight_averaging(run: Run) -> None:
    """WeightAveraging: the mean of the weights, which the module has in the end."""
    run.fit(_WithAdam(), callbacks=[callbacks.WeightAveraging()], max_epochs=2)


@program(on_three_ranks=True)
def ema_weight_averaging(run: Run) -> None:
    """EMAWeightAveraging, which validates with the average."""
    averages = callbacks.EMAWeightAveraging(decay=0.8)
    run.fit(_WithAdam(), val=run.loader(2), callbacks=[averages], max_epochs=2)


def _averaged_and_resumed(run: Run, **settings: Any) -> None:
    def fit(folder: str, **kwargs: Any) -> pl.Trainer:
        averages = callbacks.EMAWeightAveraging(decay=0.8)
        saves = callbacks.ModelCheckpoint(run.folder / folder, "{epoch}", save_top_k=-1, every_n_epochs=1)
        ours = {"strategy": run.make_strategy(**settings)} if run.strategy.startswith("fsdp") else {}
        kwargs |= {"callbacks": [averages, saves], "enable_checkpointing": True, **ours}
        return run.fit(_WithAdam(), val=run.loader(2), **kwargs)

    fit("first", max_epochs=2)
    trainer = fit("second", ckpt_path=run.folder / "first" / "epoch=0.ckpt", max_epochs=3)
    path = run.folder / "second" / "epoch=1.ckpt"
    run.keep(**trainer.validate(_WithAdam(), run.loader(2), ckpt_path=path, verbose=False)[0])


@program()
def ema_weight_averaging_resumed(run: Run) -> None:
    """EMAWeightAveraging goes on from the middle of a fit, with the weights and their average."""
    _averaged_and_resumed(run)


@program(without=("stage*",))
def ema_weight_averaging_resumed_from_a_file(run: Run) -> None:
    """The same with `save_distributed_checkpoint=False`."""
    _averaged_and_resumed(run, save_distributed_checkpoint=False)


class _Backbone(_WithAdam):
    def build(self) -> nn.Module:
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))  # two weights of one shape
        return nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.net(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 0.05)


@program(reference="single")
def backbone_finetuning(run: Run) -> None:
    """BackboneFinetuning: the backbone is frozen, and unfrozen in the second epoch."""
    run.fit(_Backbone(), callbacks=[callbacks.BackboneFinetuning(1, verbose=False)], max_epochs=3)


@program(reference="single")
def backbone_finetuning_resumed(run: Run) -> None:
    """BackboneFinetuning, resumed after the backbone was unfrozen: Lightning freezes it again."""
    first = run.fit(_Backbone(), callbacks=[callbacks.BackboneFinetuning(1, verbose=False)], max_epochs=2)
    path = run.folder / "unfrozen.ckpt"
    first.save_checkpoint(path)
    tuning = callbacks.BackboneFinetuning(1, verbose=False)
    module = _Backbone()
    trainer = run.fit(module, callbacks=[tuning], max_epochs=3, ckpt_path=path)
    run.keep(**trainer.validate(module, run.loader(2), ckpt_path=path, verbose=False)[0])


class _FreezesForAWhile(_Backbone):
    def on_train_epoch_start(self) -> None:
        self.backbone.requires_grad_(self.current_epoch != 1)


@program(reference="single")
def frozen_when_saved(run: Run) -> None:
    """The backbone is frozen in the second epoch, at whose end a checkpoint is written; the third trains it again."""
    first = run.fit(_FreezesForAWhile(), max_epochs=2)
    path = run.folder / "frozen.ckpt"
    first.save_checkpoint(path)
    run.fit(_FreezesForAWhile(), max_epochs=3, ckpt_path=path)


@program()
def hooks_of_a_callback(run: Run) -> None:
    """A callback of the user's own reads losses and gradients, and writes weights."""

    class Watches(pl.Callback):
        def on_train_batch_end(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            pl_module.log("seen", outputs["loss"], sync_dist=True)

        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
            for name, param in pl_module.named_parameters():
                pl_module.log(f"grad/{name}", param.grad.norm())  # type: ignore[union-attr]

        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            with zp.gathered(pl_module), torch.no_grad():
                for param in pl_module.parameters():
                    param.mul_(0.95)

    run.fit(_WithAdam(), callbacks=[Watches()], max_epochs=2)


@program()
def callback_with_a_state(run: Run) -> None:
    """A callback's state goes through a checkpoint."""

    class Counts(pl.Callback):
        batches = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.batches += 1

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.batches = state_dict["batches"]

    trainer = run.fit(_WithAdam(), callbacks=[Counts()])
    trainer.save_checkpoint(run.folder / "counted.ckpt")
    resumed = Counts()
    run.fit(_WithAdam(), callbacks=[resumed], max_epochs=2, ckpt_path=run.folder / "counted.ckpt")
    run.keep(batches=resumed.batches)


@program()
def samples_in_a_callback(run: Run) -> None:
    """A callback calls the network in evaluation at the end of an epoch, on all ranks, and logs from it."""

    class Samples(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            pl_module.eval()
            with torch.no_grad():
                pl_module.log("sample", pl_module(torch.ones(1, 8, device=pl_module.device)).mean())
            pl_module.train()

    run.fit(_WithAdam(), callbacks=[Samples()], max_epochs=2)


@program()
def stopped_by_a_callback(run: Run) -> None:
    """`trainer.should_stop`, set by a callback, and Timer with a long limit."""
    stops = callbacks.LambdaCallback(
        on_train_batch_end=lambda trainer, *args: setattr(trainer, "should_stop", trainer.global_step >= 6)
    )
    run.fit(_WithAdam(), callbacks=[stops, callbacks.Timer("01:00:00:00")], max_epochs=4, min_epochs=1)


@program()
def predictions_written(run: Run) -> None:
    """`predict` with a BasePredictionWriter, after a fit."""
    written = []

    class Writes(callbacks.BasePredictionWriter):
        def write_on_batch_end(self, trainer: pl.Trainer, pl_module: Any, prediction: Any, *args: Any) -> None:
            written.append(prediction)

    class Predicts(_WithAdam):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0])

    module = Predicts()
    run.fit(module)
    run.trainer(callbacks=[Writes("batch")]).predict(module, run.loader(2), return_predictions=False)
    for index, prediction in enumerate(written):
        run.keep(**{f"prediction_{index}": prediction})
