"""When gradients of parameters that no optimizer has are averaged: collectives are counted, without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zeroplus.engine.families import outside


class _Accumulation(outside.AveragesOutside):
    def __init__(self, optimized: set[int]) -> None:
        self.engine: Any = SimpleNamespace(seq_data_parallel_group=None, device=torch.device("cpu"))
        self.params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        self.optimized, self.frozen = frozenset(optimized), frozenset()
        self.serve_others = lambda: None
        for param in self.params:
            param.grad = torch.ones(2)


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    met: list[str] = []
    monkeypatch.setattr(outside, "meet", lambda what, details: met.append(what))
    monkeypatch.setattr(outside.dist, "all_reduce", lambda *args, **kwargs: None)
    monkeypatch.setattr(outside.dist, "get_world_size", lambda group: 2)
    return met


def _backwards(accumulation: _Accumulation, count: int) -> None:
    for _ in range(count):
        accumulation.note_outside(False)
        accumulation.follow_outside()


def test_nobody_meets_where_optimizers_have_all(meetings: list[str]) -> None:
    accumulation = _Accumulation({0, 1, 2})
    accumulation.note_outside(False)
    accumulation.average_outside()
    _backwards(accumulation, 2)
    assert not meetings


def test_new_partitions_do_not_look(meetings: list[str]) -> None:
    accumulation = _Accumulation({0, 1})
    accumulation.note_outside(False)
    accumulation.average_outside(is_looked_at=False)
    _backwards(accumulation, 2)
    assert len(meetings) == 1


def test_what_was_looked_at_is_averaged_after_each_backward(meetings: list[str]) -> None:
    accumulation = _Accumulation({0, 1})
    accumulation.note_outside(False)
    accumulation.average_outside()
    accumulation.average_outside()
    assert len(meetings) == 1
    _backwards(accumulation, 2)
    assert len(meetings) == 3
    assert accumulation.params[2].grad is not None
    assert accumulation.params[2].grad.tolist() == [1 / 8, 1 / 8], "averages of two ranks, of which one has none"


def test_a_backward_in_no_sync_is_not_followed(meetings: list[str]) -> None:
    accumulation = _Accumulation({0, 1})
    accumulation.note_outside(False)
    accumulation.average_outside()
    _backwards(accumulation, 1)
    accumulation.note_outside(True)
    accumulation.follow_outside()
    assert len(meetings) == 2
    accumulation.note_outside(False)
    accumulation.note_outside(True)
    with pytest.raises(RuntimeError, match="sum of an average and of this rank's own gradient"):
        accumulation.average_outside()
