"""Whether all ranks have the same number of batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

if TYPE_CHECKING:
    import lightning.pytorch as pl


def check_same_number_of_batches(strategy: ParallelStrategy, trainer: pl.Trainer) -> None:
    """Compare the number of training batches of all ranks, where loaders have a length.

    A rank with fewer batches would leave the epoch early. The others would wait for it in a reduction until the time
    limit of collectives, or their reduction would meet another collective of that rank.

    Raises:
        MisconfigurationException: On all ranks, if the numbers differ; nothing has been trained.
    """
    if strategy.world_size == 1:
        return
    batches = trainer.num_training_batches
    if trainer.max_steps >= 0:
        batches = min(batches, trainer.max_steps * trainer.accumulate_grad_batches)
    _compare(strategy, batches, "training", "train")


def check_evaluation(strategy: ParallelStrategy, trainer: pl.Trainer) -> None:
    """Compare the number of evaluation batches of all ranks. Called if a forward gathers weights from all ranks.

    Raises:
        MisconfigurationException: On all ranks, if the numbers differ; nothing has been evaluated.
    """
    if strategy.world_size == 1:
        return
    if trainer.predicting:
        kind, limit, loop = "prediction", "predict", trainer.num_predict_batches
    elif trainer.testing:
        kind, limit, loop = "test", "test", trainer.num_test_batches
    else:
        kind, limit = "validation", "val"
        loop = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
    _compare(strategy, sum(loop), kind, limit)


class ChecksEvaluation(ParallelStrategy):
    """A strategy that compares the number of batches before each evaluation."""

    def _check_evaluation(self) -> None:
        assert self.lightning_module is not None
        check_evaluation(self, self.lightning_module.trainer)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._check_evaluation()

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self._check_evaluation()

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._check_evaluation()


def _compare(strategy: ParallelStrategy, batches: float, kind: str, limit: str) -> None:
    mine = torch.tensor([-1 if math.isinf(batches) else int(batches)], device=strategy.root_device)
    everyone = strategy.all_gather(mine).flatten().tolist()
    if len(set(everyone)) > 1:
        numbers = ", ".join(f"rank {rank}: {'unknown' if n < 0 else n}" for rank, n in enumerate(everyone))
        raise MisconfigurationException(
            f"The ranks have different numbers of {kind} batches ({numbers}), and would wait for each other at the"
            f" end. Give all ranks the same number: `Trainer(limit_{limit}_batches=...)` with the smallest number, or"
            " a sampler that drops or repeats the rest, as Lightning's own does."
        )
