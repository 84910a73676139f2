"""Stage 0: the bucket in which gradients are averaged."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_zeroplus.engine.families import replicated
from tests.weights.programs import Program, fit


class _Looks(Program):
    """Notes, at each step, in how many pieces of memory the gradients lie, and whether each is contiguous there."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [param.grad for param in self.parameters() if param.grad is not None]
        self.seen = [
            *getattr(self, "seen", []),
            (len(grads), len({grad.untyped_storage().data_ptr() for grad in grads})),
        ]


def _memory(alone: int) -> list[tuple[int, int]]:
    with patch.object(replicated, "_ALONE", alone):
        return fit("0", _Looks()).seen  # type: ignore[attr-defined]


def test_gradients_are_views_of_their_bucket(ranks2: Any) -> None:
    for seen in ranks2.run(_memory, replicated._ALONE):
        assert seen
        assert all(grads > 1 and pieces == 1 for grads, pieces in seen)


def test_large_gradients_stay_where_they_are(ranks2: Any) -> None:
    for seen in ranks2.run(_memory, 1):
        assert seen
        assert all(pieces == grads > 1 for grads, pieces in seen)


def test_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """By dtype, as many elements as upstream takes at a time; a sparse gradient is alone, and so is a large one."""
    monkeypatch.setattr(replicated, "_BUCKET_ELEMENTS", 5)
    monkeypatch.setattr(replicated, "_ALONE", 4)
    one, two, three, four = (torch.zeros(3) for _ in range(4))
    double, sparse = torch.zeros(2, dtype=torch.float64), torch.zeros(2, 2).to_sparse()
    large = torch.zeros(4)
    buckets = list(replicated._buckets([one, double, two, large, sparse, three, four]))
    found = [[id(tensor) for tensor in bucket] for bucket in buckets]
    assert found == [[id(t) for t in bucket] for bucket in ([large], [sparse], [one, two], [three, four], [double])]
