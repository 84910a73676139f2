"""A rank that reads a weight now and then, before all ranks write weights: the others expect what came before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.programs.base import Manual
from tests.programs.run import pairs
from tests.programs.state import whole_state
from tests.support.training import trainer, zero_plus

_BATCHES = 10


class _Late(Manual):
    """Rank 0 reads alone in the seventh and tenth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if batch_idx in (6, 9) and self.global_rank == 0:
            self.kept = float(self.net[2].weight.norm())  # type: ignore[index,union-attr]
        with torch.no_grad():
            for param in self.parameters():
                param.div_(1 + param.norm())
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def on_train_end(self) -> None:
        self.trained = whole_state(self)


def _trained(strategy: Any) -> dict[str, torch.Tensor]:
    module = _Late()
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    batches: Any = [pairs(generator, 4) for _ in range(_BATCHES)]
    trainer(strategy, max_epochs=1, max_steps=-1, use_distributed_sampler=False).fit(
        module, torch.utils.data.DataLoader(batches, batch_size=None)
    )
    return module.trained


def _error(reduction: str) -> float:
    got = _trained(zero_plus(3, reduction=reduction))
    want = _trained("ddp")
    return max(float((got[name] - value).norm() / value.norm()) for name, value in want.items())


@pytest.mark.parametrize("reduction", ["backward", "step"])
def test_what_it_has_gathered_with_the_others_is_not_gathered_again(ranks2: Any, reduction: str) -> None:
    for error in ranks2.run(_error, reduction):
        assert error <= 1e-6
