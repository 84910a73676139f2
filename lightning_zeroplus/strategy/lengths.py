"""Whether all ranks have the same number of batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    import lightning.pytorch as pl


def check_same_number_of_batches(strategy: ParallelStrategy, trainer: pl.Trainer) -> None:
    """Compare how many batches of an epoch each rank will train on, where loaders have a length.

    With fewer on one rank, that rank leaves the epoch while the others wait for it in a reduction until the time limit
    of collectives, or get what it sends for something else.

    Raises:
        MisconfigurationException: On all ranks, if the numbers differ; nothing has been trained.
    """
    if strategy.world_size == 1:
        return
    batches = trainer.num_training_batches
    if trainer.max_steps >= 0:
        batches = min(batches, trainer.max_steps * trainer.accumulate_grad_batches)
    mine = torch.tensor([-1 if math.isinf(batches) else int(batches)], device=strategy.root_device)
    everyone = strategy.all_gather(mine).flatten().tolist()
    if len(set(everyone)) > 1:
        numbers = ", ".join(f"rank {rank}: {'unknown' if n < 0 else n}" for rank, n in enumerate(everyone))
        raise MisconfigurationException(
            f"The ranks have different numbers of training batches ({numbers}), and would wait for each other at the"
            " end of the epoch. Give all ranks as many: `Trainer(limit_train_batches=...)` with the smallest number, or"
            " a sampler that drops or repeats the rest, as Lightning's own does."
        )
