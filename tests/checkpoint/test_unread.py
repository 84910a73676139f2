"""Weights that are read when a hook needs their values."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from lightning_zeroplus.checkpoint.hooked import Unread


class _File:
    """Counts how often its weight is read."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self) -> Tensor:
        self.reads += 1
        return torch.arange(6.0).view(2, 3)

    def unread(self) -> Unread:
        return Unread.of((2, 3), torch.float32, self.read)


def test_what_needs_no_values_reads_nothing() -> None:
    file = _File()
    weight = file.unread()
    assert weight.shape == (2, 3) and weight.numel() == 6 and weight.dtype == torch.float32 and len(weight) == 2
    assert not weight.requires_grad and weight.is_floating_point() and {weight: 1}[weight] == 1
    assert file.reads == 0 and weight.whole is None


def test_results_are_ordinary_tensors_of_one_read() -> None:
    file = _File()
    weight = file.unread()
    half, copied = 0.5 * weight, copy.deepcopy(weight)
    assert type(half) is type(copied) is Tensor
    assert torch.equal(half, torch.arange(6.0).view(2, 3) / 2) and torch.equal(copied, torch.arange(6.0).view(2, 3))
    assert weight.device == torch.device("cpu") and not weight.is_meta
    assert file.reads == 1


def test_writes_stay() -> None:
    weight = _File().unread()
    weight.mul_(2)
    weight.data.add_(1)
    weight[0][1] = 7
    torch.neg(weight[1], out=weight[1])
    assert weight.whole is not None
    assert torch.equal(weight.whole, torch.tensor([[1.0, 7.0, 5.0], [-7.0, -9.0, -11.0]]))
