"""Ranks that run different units, or parts of them, train as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.fsdp.programs import WAYS, Automatic, Manual, difference, run
from tests.fsdp.training import ours

BOUND = 1e-6


def _skips(module: Any, at: int) -> bool:
    """From the seventh batch on, each rank by turns: what came before is expected of it."""
    return at >= 6 and at % 2 == module.global_rank


def _skip_a_block(module: Any, batch: Any, at: int) -> Tensor:
    net = module.net
    blocks = net.blocks
    try:
        net.blocks = blocks[:1] if _skips(module, at) else blocks
        return module.loss(batch)
    finally:
        net.blocks = blocks


class SkipsABlock(Manual):
    """Stochastic depth."""

    trainer_kwargs = {"max_steps": 20}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for chunk in self.chunks(batch):
            self.manual_backward(_skip_a_block(self, chunk, batch_idx) / self.backwards)
        self.step()


class SkipsABlockAutomatically(Automatic):
    """Gradients are zeroed between forward and backward."""

    trainer_kwargs = {"max_steps": 10}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return _skip_a_block(self, batch, batch_idx)


class RegularizesByRank(Manual):
    """A weight that a rank uses outside of its unit's forward, before and after it."""

    trainer_kwargs = {"max_steps": 20}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        penalty = 0.0 if _skips(self, batch_idx) else self.net.blocks[0].up.weight.square().mean()
        loss = self.loss(batch) + penalty
        if _skips(self, batch_idx):
            loss = loss + self.net.blocks[1].down.weight.square().mean()
        self.manual_backward(loss)
        self.step()


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", [SkipsABlock, SkipsABlockAutomatically, RegularizesByRank])
def test_ranks_that_differ(ranks2: Any, program: type, way: str) -> None:
    for error, noted in ranks2.run(difference, program, way):
        assert error <= BOUND
        assert noted <= BOUND


class CountsRounds(Manual):
    """Notes how many announcements each batch took."""

    trainer_kwargs = {"max_steps": 20}
    before = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        count = self.trainer.strategy._gradients.in_step._lockstep.count  # type: ignore[attr-defined]
        self.noted.append(count - self.before)
        self.before = count
        self.differentiate(batch)
        self.step()


def _rounds() -> list[float]:
    return run(CountsRounds, ours())[1]


def test_a_regular_loop_announces_its_ends_only(ranks2: Any) -> None:
    for noted in ranks2.run(_rounds):
        assert noted[1] > 10, "gathers and reductions of the first batch"
        assert noted[-1] == CountsRounds.backwards + 2, "a backward, a step, and the beginning of a batch"
