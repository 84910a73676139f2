"""Evaluation steps, whose backwards are each rank's own: DDP reduces those of the training."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_zeroplus.strategy.fsdp2.gradients import ShardedGradients


@contextmanager
def local_backwards(gradients: ShardedGradients) -> Generator[None, None, None]:
    """Around an evaluation step: what its backwards bring waits on this rank, as after ``no_sync()``."""
    before = gradients.withheld, gradients.unsynced
    gradients.evaluates, gradients.unsynced = True, False
    try:
        with gradients.no_sync():
            gradients.withheld = before[0]  # until there is one
            yield
    finally:
        gradients.evaluates = False
        if not gradients.unsynced:  # there was none
            gradients.withheld, gradients.unsynced = before
