"""A small GAN on handwritten digits: two optimizers in one LightningModule, under ZeRO-3, on two CPU processes.

::

    python examples/gan.py                     # zeroplus_stage3
    python examples/gan.py --strategy ddp_find_unused_parameters_true

It learns to draw the 8 x 8 digits of scikit-learn, and measures how near it has come: the Fréchet distance between the
Gaussians that have the mean and covariance of real and of generated digits (Heusel et al., 2017), on pixels. Samples
and losses go to ``samples.png`` and ``history.json`` in ``outputs/gan/<strategy>/``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from quiet import quiet
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_zeroplus  # noqa: F401  (registers the zeroplus_* strategies)

matplotlib.use("Agg")  # no display is needed to write a file
from matplotlib import pyplot as plt

NOISE = 32
#: Before training it is 40. Noise with the mean and variance of each pixel is at 6.7, one half of the digits at 0.3
#: from the other.
REQUIRED_DISTANCE = 5.0


def digits() -> Tensor:
    """``(1797, 64)`` images in [-1, 1]."""
    images, _ = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 8 - 1


class DigitGan(LightningModule):
    """A generator, a discriminator, and an optimizer for each.

    Args:
        seed: Seed of the initial weights.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seed = seed
        self.generator: nn.Sequential | None = None
        self.history: dict[str, list[float]] = {"discriminator": [], "generator": []}

    def configure_model(self) -> None:
        """Build the networks; under ZeRO-3 each layer is partitioned as soon as it is built."""
        if self.generator is None:
            torch.manual_seed(self.seed)
            self.generator = nn.Sequential(
                nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU(),
                nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(),
                nn.Linear(128, 64), nn.Tanh(),
            )  # fmt: skip
            self.discriminator = nn.Sequential(
                nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3),
                nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3),
                nn.Linear(128, 1),
            )  # fmt: skip

    def configure_optimizers(self) -> Any:
        assert self.generator is not None
        networks = self.generator, self.discriminator
        return [torch.optim.Adam(network.parameters(), 2e-3, betas=(0.0, 0.99)) for network in networks]

    def sample(self, count: int) -> Tensor:
        """``(count, 64)`` images."""
        assert self.generator is not None
        return self.generator(torch.randn(count, NOISE, device=self.device))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (real,) = batch
        of_generator, of_discriminator = self.optimizers()  # type: ignore[misc, attr-defined]
        fake = self.sample(len(real))

        loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake.detach())).mean()
        of_discriminator.zero_grad()  # the generator's loss has left gradients there
        self.manual_backward(loss)
        of_discriminator.step()
        self.history["discriminator"].append(loss.item())

        loss = F.softplus(-self.discriminator(fake)).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_generator, 1.0, "norm")
        of_generator.step()
        self.history["generator"].append(loss.item())

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.sample(len(batch[0]))


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Between the Gaussians with the means and covariances of two sets of images."""
    (mean, cov), (other_mean, other_cov) = (
        (x.mean(0).numpy(), np.cov(x.numpy(), rowvar=False)) for x in (first, second)
    )
    roots = np.sqrt(np.linalg.eigvals(cov @ other_cov).real.clip(0))
    return float(((mean - other_mean) ** 2).sum() + np.trace(cov + other_cov) - 2 * roots.sum())


def draw(images: Tensor, path: Path) -> None:
    """Write a picture of 8 x 8 images."""
    figure, axes = plt.subplots(8, 8, figsize=(4, 4), layout="constrained")
    for image, place in zip(images, axes.flat, strict=False):
        place.imshow(image.view(8, 8), cmap="gray_r", vmin=-1, vmax=1)
        place.set_axis_off()
    figure.savefig(path, dpi=140)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--strategy", default="zeroplus_stage3", help="a Lightning strategy (default: %(default)s)")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2, help="number of processes (default: %(default)s)")
    parser.add_argument("--max-epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs", "gan"))
    arguments = parser.parse_args()

    quiet()
    seed_everything(arguments.seed)
    module = DigitGan(arguments.seed)
    trainer = Trainer(
        strategy=arguments.strategy,
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_epochs=arguments.max_epochs,
        callbacks=[TQDMProgressBar()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    real = digits()
    trainer.fit(module, DataLoader(TensorDataset(real), batch_size=64, shuffle=True, drop_last=True))
    module.eval()
    with torch.no_grad():
        images = module.sample(len(real))  # after the fit the weights are whole again, on every rank
    distance = frechet_distance(real, images)
    if trainer.is_global_zero:
        folder = arguments.output_dir / arguments.strategy
        folder.mkdir(parents=True, exist_ok=True)
        draw(images, folder / "samples.png")
        history = {**module.history, "distance": distance}
        (folder / "history.json").write_text(json.dumps(history, indent=1), encoding="utf-8")
        print(f"Fréchet distance {distance:.1f} (required {REQUIRED_DISTANCE:.0f}); samples: {folder / 'samples.png'}")
    # The first rank's status is the job's. Lightning's launcher of DDP would kill it if another rank failed earlier.
    return 1 if trainer.is_global_zero and distance > REQUIRED_DISTANCE else 0


if __name__ == "__main__":
    sys.exit(main())
