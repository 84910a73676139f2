"""Stage 0: the bucket in which gradients are averaged."""

from __future__ import annotations

from typing import Any

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


def _memory() -> list[tuple[int, int]]:
    return fit("0", _Looks()).seen  # type: ignore[attr-defined]


def test_gradients_are_views_of_their_bucket(ranks2: Any) -> None:
    for seen in ranks2.run(_memory):
        assert seen
        assert all(grads > 1 and pieces == 1 for grads, pieces in seen)


def test_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """By dtype, as many elements as upstream takes at a time; a sparse gradient is alone."""
    monkeypatch.setattr(replicated, "_BUCKET_ELEMENTS", 5)
    one, two, three, four = (torch.zeros(3) for _ in range(4))
    double, sparse = torch.zeros(2, dtype=torch.float64), torch.zeros(2, 2).to_sparse()
    buckets = list(replicated._buckets([one, double, two, sparse, three, four]))
    found = [[id(tensor) for tensor in bucket] for bucket in buckets]
    assert found == [[id(t) for t in bucket] for bucket in ([sparse], [one, two], [three, four], [double])]
