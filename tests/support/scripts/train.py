"""Fit a few steps with a strategy by name and print a checksum of the weights; may fail on one rank on purpose."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from lightning.pytorch import Callback

from tests.support.training import Classifier, ManualClassifier, loader, trainer, weights


class Fails(Classifier):
    """Raises in the third training step of one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        if batch_idx == 2 and self.global_rank == self.rank:
            print(f"raised at {time.time():.3f}", flush=True)
            raise RuntimeError(f"planned failure on rank {self.rank}")
        return super().training_step(batch, batch_idx)


class FailsInWindow(ManualClassifier):
    """Raises within the window of the third step of one rank, while the others have much to do until their flush."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with self.trainer.strategy.coalesce():
            self.manual_backward(self.loss(batch))
            if batch_idx == 2:
                if self.global_rank == self.rank:
                    self.raised = time.monotonic()
                    raise RuntimeError(f"planned failure on rank {self.rank}")
                for _ in range(1000):
                    self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()

    def configure_callbacks(self) -> Callback:
        return Surfaces()


class Surfaces(Callback):
    """Says how long a planned error took to get out of the training step."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if hasattr(pl_module, "raised"):
            print(f"surfaced after {time.monotonic() - pl_module.raised:.3f} s", flush=True)


class FirstStep(Callback):
    """Says how long the first optimizer step was awaited."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 1 and trainer.is_global_zero:
            print(f"first step after {time.monotonic() - self.began:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="zeroplus_stage3")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--fail-on", type=int)
    parser.add_argument("--in-window", action="store_true")
    args = parser.parse_args()
    fails = FailsInWindow if args.in_window else Fails
    module = Classifier() if args.fail_on is None else fails(args.fail_on)
    run = trainer(args.strategy, devices=args.devices, accelerator=args.accelerator, callbacks=[FirstStep()])
    run.fit(module, loader(), loader(64))
    total = float(weights(module).double().sum())
    if run.is_global_zero:
        print(f"world {run.world_size} weights {total:.6f}")


if __name__ == "__main__":
    main()
