"""A backward that is captured in a CUDA graph is refused: a replay would reduce nothing."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_zeroplus.testing import RankPool
from tests.support.training import Classifier, trainer, zero_plus


class _Captured(Classifier):
    """The second batch's backward runs while the stream is captured."""

    def __init__(self, direct: bool) -> None:
        super().__init__(scheduler=None)
        self.automatic_optimization = False
        self.direct = direct

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: batch_idx == 1):
            (loss.backward if self.direct else lambda: self.manual_backward(loss))()
        self.optimizers().step()  # type: ignore[union-attr]
        self.optimizers().zero_grad()  # type: ignore[union-attr]


def _refusal(stage: int, direct: bool) -> str:
    data = torch.utils.data.TensorDataset(torch.ones(16, 8), torch.zeros(16, dtype=torch.long))
    fitting = trainer(zero_plus(stage, reduction="backward"), max_steps=3)
    try:
        fitting.fit(_Captured(direct), torch.utils.data.DataLoader(data, batch_size=2))
    except RuntimeError as error:
        return f"{fitting.global_step}: {error}"
    return ""


@pytest.mark.parametrize("direct", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_capture_is_refused_where_nothing_is_deferred(cuda_ranks: RankPool, stage: int, direct: bool) -> None:
    for said in cuda_ranks.run(_refusal, stage, direct):
        assert said.startswith("1: ") and "cannot be captured in a CUDA graph" in said
