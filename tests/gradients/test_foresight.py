"""Which reductions a backward is expected to consist of; what ranks do with it is in the programs of ``experts``."""

from __future__ import annotations

import torch

from lightning_zeroplus.gradients.ranks.foresight import _TIMES, Foresight
from lightning_zeroplus.gradients.ranks.lockstep import Flush


def _flush(number: int) -> Flush:
    return Flush(number, None, ((number, torch.float32),))


def _backward(foresight: Foresight, *numbers: int, is_all: bool = True) -> list[Flush | None]:
    """What was expected before each flush."""
    expected = []
    for number in numbers:
        expected.append(foresight.next())
        foresight.passed(_flush(number), is_all)
    foresight.end()
    return expected


def _regular(*numbers: int) -> Foresight:
    foresight = Foresight()
    for _ in range(_TIMES + 1):
        assert _backward(foresight, *numbers) == [None] * len(numbers)
    return foresight


def test_a_backward_that_has_come_often_enough_is_expected() -> None:
    foresight = _regular(1, 2)
    assert _backward(foresight, 1, 2) == [_flush(1), _flush(2)]


def test_backwards_by_turns() -> None:
    foresight = Foresight()
    for _ in range(_TIMES + 1):
        _backward(foresight, 1)
        _backward(foresight, 2, 3)
    assert _backward(foresight, 1) == [_flush(1)]
    assert _backward(foresight, 2, 3) == [_flush(2), _flush(3)]


def test_no_more_flushes_than_expected() -> None:
    assert _backward(_regular(1), 1, 2) == [_flush(1), None]


def test_another_backward_has_to_come_often_again() -> None:
    foresight = _regular(1)
    _backward(foresight, 2)
    assert _backward(foresight, 1) == [None]
    assert _backward(foresight, 1) == [None]


def test_ranks_that_part_expect_nothing() -> None:
    foresight = _regular(1)
    foresight.forget()
    assert _backward(foresight, 1) == [None]


def test_what_is_only_a_part_of_a_backward_is_not_expected() -> None:
    foresight = Foresight()
    for _ in range(2 * _TIMES):
        assert _backward(foresight, 1, is_all=False) == [None]


def test_a_backward_whose_gradients_all_wait_is_not_counted() -> None:
    foresight = _regular(1)
    foresight.end()
    assert _backward(foresight, 1) == [_flush(1)]
