"""Training as most users write it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.base import Regression
from tests.programs.program import program
from tests.programs.run import Run, images


@program(on_three_ranks=True)
class sgd(Regression):
    """Automatic optimization, SGD with momentum."""


@program(on_three_ranks=True)
class adamw(Regression):
    """Automatic optimization, AdamW with weight decay."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01, weight_decay=0.1)


@program(trainer={"accumulate_grad_batches": 3})
class accumulate(Regression):
    """`accumulate_grad_batches`, with an incomplete last window."""


@program(trainer={"gradient_clip_val": 0.05}, on_three_ranks=True)
class clip_by_norm(Regression):
    """`gradient_clip_val`, by norm."""


@program(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"})
class clip_by_value(Regression):
    """`gradient_clip_val`, by value."""


@program(trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05})
class accumulate_and_clip(Regression):
    """Accumulation and clipping together."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


@program(also=("stage1_compile", "stage2_compile", "stage3_compile"))
class cosine_schedule(Regression):
    """A schedule that moves after every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@program()
class warmup_then_decay(Regression):
    """SequentialLR: a warm-up, then an exponential decay."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.2)
        lr = torch.optim.lr_scheduler
        schedule = lr.SequentialLR(
            optimizer, [lr.LinearLR(optimizer, 0.1, total_iters=2), lr.ExponentialLR(optimizer, 0.5)], [2]
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@program()
class one_cycle(Regression):
    """OneCycleLR, which changes momentum, too."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@program()
def reduce_on_plateau(run: Run) -> None:
    """ReduceLROnPlateau, on a validation metric."""

    class Plateau(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.3, momentum=0.9)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    run.fit(Plateau(), val=run.loader(2), max_epochs=4)


@program(on_three_ranks=True)
class two_groups(Regression):
    """Parameter groups: no weight decay for biases, another learning rate for the head."""

    def configure_optimizers(self) -> Any:
        first, head = self.net[0], self.net[2]
        groups = [
            {"params": [first.weight, head.weight], "weight_decay": 0.1},
            {"params": [first.bias], "weight_decay": 0.0},
            {"params": [head.bias], "weight_decay": 0.0, "lr": 0.05},
        ]
        return torch.optim.AdamW(groups, 0.01)


@program()
class frozen_trunk(Regression):
    """Fine-tuning of a head; the trunk is frozen from the start."""

    def build(self) -> nn.Module:
        net = super().build()
        net[0].requires_grad_(False)  # type: ignore[index]
        return net

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([param for param in self.parameters() if param.requires_grad], 0.1)


@program()
class dictionary_of_outputs(Regression):
    """`training_step` returns a dictionary, whose loss `on_train_batch_end` logs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "mean": self(batch[0]).mean().detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_dict({"loss": outputs["loss"], "mean": outputs["mean"]}, sync_dist=True)


@program()
class several_losses(Regression):
    """A classifier and an autoencoder share an encoder; the sum of three losses."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"encode": nn.Linear(8, 6), "decode": nn.Linear(6, 8), "head": nn.Linear(6, 4)})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        code = torch.tanh(self.net["encode"](batch[0]))  # type: ignore[index]
        losses = {
            "fit": F.mse_loss(self.net["head"](code), batch[1]),  # type: ignore[index]
            "decoded": F.mse_loss(self.net["decode"](code), batch[0]),  # type: ignore[index]
            "sparse": code.abs().mean(),
        }
        self.log_dict(losses, sync_dist=True)
        return sum(losses.values())


@program()
def validates_every_second_batch(run: Run) -> None:
    """Validation within an epoch, with metrics of the epoch."""
    run.fit(Regression(), val=run.loader(2), max_epochs=2, val_check_interval=2)


@program(also=("stage2_compile", "stage3_compile"))
def image_classifier(run: Run) -> None:
    """A small convolutional network, with a torchmetrics accuracy."""
    import torchmetrics

    class Classifier(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)

        def build(self) -> nn.Module:
            return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))

        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.accuracy(self(batch[0]), batch[1])
            self.log("accuracy", self.accuracy, on_epoch=True)

    run.fit(Classifier(), run.loader(make=images), run.loader(2, make=images))


@program()
def sampler_of_lightning(run: Run) -> None:
    """One dataset for all ranks, which Lightning's DistributedSampler shares out."""
    generator = torch.Generator().manual_seed(5)
    data = torch.utils.data.TensorDataset(torch.randn(24, 8, generator=generator), torch.randn(24, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    run.fit(Regression(), loader, use_distributed_sampler=True, max_epochs=2)


@program()
class logs_in_every_way(Regression):
    """Metrics per step and epoch, summed and averaged, with and without `sync_dist`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("step", loss, on_step=True, on_epoch=False)
        self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("largest", loss, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.log("weight", self.all_gather(loss.detach()).sum())
        return loss


@program()
class max_steps_and_epochs(Regression):
    """`on_train_epoch_end` reads `callback_metrics`; hooks count steps."""

    def on_train_epoch_end(self) -> None:
        self.log("twice", 2 * self.trainer.callback_metrics["loss"], sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("global_step", float(self.trainer.global_step))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("zeroed_before", float(self.trainer.global_step))
