"""Which tensors have elements in common, and that a step refuses weights that do."""

import pytest
import torch
from torch import Tensor

from lightning_zeroplus.weights.overlaps import check_apart, overlaps


def _of(**tensors: Tensor) -> list[tuple[str, str]]:
    return list(overlaps(tensors.items()))


def test_parts_of_one_tensor() -> None:
    whole = torch.zeros(6, 4)
    assert _of(first=whole[:3], second=whole[3:]) == []
    assert _of(first=whole[:3], second=whole[2:]) == [("first", "second")]
    assert _of(first=whole, second=whole.T) == [("first", "second")]


def test_columns_lie_within_one_another() -> None:
    whole = torch.zeros(6, 4)
    assert _of(first=whole[:, :2], second=whole[:, 2:]) == []
    assert _of(first=whole[:, :3], second=whole[:, 2:]) == [("first", "second")]
    assert _of(even=whole[::2], odd=whole[1::2]) == []
    assert _of(even=whole[::2], fifth=whole[4]) == [("even", "fifth")]


def test_all_pairs_are_found() -> None:
    whole = torch.zeros(8)
    assert sorted(map(sorted, _of(a=whole[:4], b=whole[2:6], c=whole[5:], d=torch.zeros(8)))) == [
        ["a", "b"],
        ["b", "c"],
    ]
    assert _of(a=whole, b=torch.zeros(8).view(2, 4)) == []


def test_no_memory() -> None:
    empty = torch.zeros(8)
    assert _of(a=empty[:0], b=empty[:0], c=torch.zeros(2, device="meta"), d=torch.zeros(2, device="meta")) == []


def test_another_dtype_of_the_same_memory() -> None:
    whole = torch.zeros(8)
    assert _of(first=whole, second=whole.view(torch.int16)[:4]) == [("first", "second")]


def test_a_step_refuses_them() -> None:
    whole = torch.zeros(4, 4)
    check_apart([("first", whole[:2]), ("second", whole[2:])])
    with pytest.raises(RuntimeError, match="'first' and 'second' have the same memory"):
        check_apart([("first", whole), ("second", whole[2:])])
