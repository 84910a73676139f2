"""What runs on every host: the stages, one after the other, trained, saved, and resumed from a shared folder."""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.training import Classifier, ManualClassifier, loader, trainer, weights, zero_plus


class Windows(ManualClassifier):
    """Two backwards in a window, and one of its own, per step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        first, second, third = zip(batch[0].split((4, 4, 8)), batch[1].split((4, 4, 8)), strict=True)
        with self.trainer.strategy.coalesce():
            self.manual_backward(self.loss(first))
            self.manual_backward(self.loss(second))
        self.manual_backward(self.loss(third))
        optimizer.step()
        optimizer.zero_grad()


def train(folder: str, stages: list[int], **kwargs: Any) -> dict[str, Tensor]:
    """Train every loop at every stage, and one that is resumed.

    Args:
        folder: For checkpoints; all ranks see the same one.
        stages: The stages.
        **kwargs: More arguments of the Trainer.

    Returns:
        The weights at the end, by loop and stage.
    """
    results = {}
    for stage in stages:
        for kind in (Classifier, Windows):
            module = kind()
            run = trainer(zero_plus(stage), max_epochs=1, limit_train_batches=3, **kwargs)
            run.fit(module, loader(96), loader(32))
            results[f"{kind.__name__}, stage {stage}"] = weights(module)
        path = Path(folder, f"stage{stage}.ckpt")
        run.save_checkpoint(path)
        resumed = Windows(seed=1)
        run = trainer(zero_plus(stage), max_epochs=2, limit_train_batches=3, **kwargs)
        run.fit(resumed, loader(96), loader(32), ckpt_path=str(path))
        assert run.global_step == 6
        results[f"resumed, stage {stage}"] = weights(resumed)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stage", type=int, action="append")
    parser.add_argument("--endless", type=float, help="train until something happens, with this time limit in seconds")
    args = parser.parse_args()
    if args.endless is not None:
        run = trainer(zero_plus(2, timeout=timedelta(seconds=args.endless)), devices=1, num_nodes=2, max_epochs=-1)
        run.fit(_Endless(args.folder), loader(96))
    results = train(str(args.folder), args.stage, devices=1, num_nodes=2)
    if os.environ["RANK"] == "0":
        torch.save(results, args.folder / "results.pt")


class _Endless(Classifier):
    def __init__(self, folder: Path) -> None:
        super().__init__(scheduler=None)
        self.folder = folder

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 3 and self.global_rank == 0:
            (self.folder / "training").touch()


if __name__ == "__main__":
    main()
