"""Handwritten digits with automatic optimization and gradient accumulation, on two CPU processes.

::

    python examples/digits.py                        # zeroplus_stage2
    python examples/digits.py --strategy ddp         # the same losses

It prints the validation accuracy and fails below 95 %. Losses go to ``outputs/digits/<strategy>/history.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from quiet import quiet
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_zeroplus  # noqa: F401  (registers the zeroplus_* strategies)

REQUIRED_ACCURACY = 0.95


class Digits(LightningDataModule):
    """The 8 x 8 digits of scikit-learn: 1437 to train, 360 to validate."""

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        parts = train_test_split(images, torch.tensor(labels), test_size=360, stratify=labels, random_state=0)
        train_images, validation_images, train_labels, validation_labels = parts
        self.train = TensorDataset(train_images, train_labels)
        self.validation = TensorDataset(validation_images, validation_labels)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation, batch_size=180)


class DigitClassifier(LightningModule):
    """Two convolutions and a linear layer.

    Args:
        seed: Seed of the initial weights.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.network: nn.Sequential | None = None
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Build the network; seeded here so that every strategy starts from the same weights."""
        if self.network is None:
            torch.manual_seed(self.seed)
            self.network = nn.Sequential(
                nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
                nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
                nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 4 * 4, 10),
            )  # fmt: skip

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def forward(self, images: Tensor) -> Tensor:
        """``(batch, 1, 8, 8)`` images in [0, 1] to ``(batch, 10)`` logits."""
        assert self.network is not None
        return self.network(images.to(self.dtype)).float()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        global_loss = torch.as_tensor(self.all_gather(loss.detach())).mean()
        self.losses.append(global_loss.item())
        self.log("loss", global_loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self(images), labels)
        # A metric counts on every rank and is merged over ranks at the end of the epoch.
        self.log("accuracy", self.accuracy, prog_bar=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--strategy", default="zeroplus_stage2", help="a Lightning strategy (default: %(default)s)")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2, help="number of processes (default: %(default)s)")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--max-epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs", "digits"))
    arguments = parser.parse_args()

    quiet()
    seed_everything(arguments.seed)
    module = DigitClassifier(arguments.seed)
    trainer = Trainer(
        strategy=arguments.strategy,
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        precision=arguments.precision,
        max_epochs=arguments.max_epochs,
        accumulate_grad_batches=2,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        callbacks=[TQDMProgressBar()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, Digits())
    accuracy = trainer.callback_metrics["accuracy"].item()
    if trainer.is_global_zero:
        folder = arguments.output_dir / arguments.strategy
        folder.mkdir(parents=True, exist_ok=True)
        history = {"loss": module.losses, "accuracy": accuracy}
        (folder / "history.json").write_text(json.dumps(history, indent=1), encoding="utf-8")
        print(f"validation accuracy {accuracy:.1%} (required {REQUIRED_ACCURACY:.0%}, chance 10%)")
    # The first rank's status is the job's. Lightning's launcher of DDP would kill it if another rank failed earlier.
    return 1 if trainer.is_global_zero and accuracy < REQUIRED_ACCURACY else 0


if __name__ == "__main__":
    sys.exit(main())
