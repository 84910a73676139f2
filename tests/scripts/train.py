"""Fit a few steps with a strategy by name and print a checksum of the weights; may fail on one rank on purpose."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from tests.training import Classifier, loader, trainer, weights


class Fails(Classifier):
    """Raises in the third training step of one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        if batch_idx == 2 and self.global_rank == self.rank:
            raise RuntimeError(f"planned failure on rank {self.rank}")
        return super().training_step(batch, batch_idx)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="zeroplus_stage3")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--fail-on", type=int)
    args = parser.parse_args()
    module = Classifier() if args.fail_on is None else Fails(args.fail_on)
    run = trainer(args.strategy, devices=args.devices, accelerator=args.accelerator)
    run.fit(module, loader(), loader(64))
    total = float(weights(module).double().sum())
    if run.is_global_zero:
        print(f"world {run.world_size} weights {total:.6f}")


if __name__ == "__main__":
    main()
