"""Buckets hold every element once; all collectives give the same averages; the budget is spent well."""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

import deepspeed
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_zeroplus.engine.reduction.exchange import (
    Bucket,
    Exchange,
    Piece,
    by_columns,
    by_elements,
    by_parameters,
    stretches,
)
from lightning_zeroplus.engine.reduction.local_sums import within_budget

_LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def _elements(pieces: list[Piece]) -> list[tuple[int, int]]:
    return [(piece.param, piece.start + offset) for piece in pieces for offset in range(piece.numel)]


@given(st.lists(_LENGTHS, min_size=1, max_size=4), st.integers(1, 100))
def test_columns_keep_every_element_in_order(lengths: list[list[int]], size: int) -> None:
    counter = iter(range(1000))
    owned = [[Piece(next(counter), 3, numel) for numel in rank] for rank in lengths]
    buckets = list(by_columns(owned, size))
    for rank, pieces in enumerate(owned):
        assert list(chain.from_iterable(_elements(bucket[rank]) for bucket in buckets)) == _elements(pieces)
    width = max(1, size // len(owned))
    for bucket in buckets:
        assert all(sum(piece.numel for piece in pieces) <= width for pieces in bucket)
    longest = max(sum(rank) for rank in lengths)
    assert len([bucket for bucket in buckets if any(_elements(pieces) for pieces in bucket)]) == -(-longest // width)


@given(st.lists(_LENGTHS, min_size=1, max_size=4), st.integers(1, 100))
def test_elements_fill_buckets(lengths: list[list[int]], size: int) -> None:
    counter = iter(range(1000))
    owned = [[Piece(next(counter), 3, numel) for numel in rank] for rank in lengths]
    buckets = list(by_elements(owned, size))
    for rank, pieces in enumerate(owned):
        assert list(chain.from_iterable(_elements(bucket[rank]) for bucket in buckets)) == _elements(pieces)
    fills = [sum(len(_elements(pieces)) for pieces in bucket) for bucket in buckets]
    assert all(fill == size for fill in fills[:-1])


@given(_LENGTHS, st.integers(1, 100))
def test_parameters_stay_whole(lengths: list[int], size: int) -> None:
    owned = [
        [Piece(index, 0, numel // 2), Piece(index, numel // 2, numel - numel // 2)]
        for index, numel in enumerate(lengths)
    ]
    buckets = list(by_parameters(owned, size))
    assert [params for bucket in buckets for params in zip(*bucket, strict=True)] == [tuple(pair) for pair in owned]
    for bucket in buckets:
        assert sum(piece.numel for pieces in bucket for piece in pieces) <= size or len(bucket[0]) == 1
    for left, right in zip(buckets[:-1], buckets[1:], strict=True):
        first = sum(pieces[0].numel for pieces in right)
        assert sum(piece.numel for pieces in left for piece in pieces) + first > size


def _grads(rank: int) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = {0: (3, 5), 1: (7,), 2: (4, 4)}
    grads = {i: torch.randint(-8, 9, shape, generator=generator).float() for i, shape in shapes.items()}
    return grads if rank else {0: grads[0], 2: grads[2]}


def _averages(
    dtype: torch.dtype, collective: str, bucket: Bucket, whole: bool, few_launches: bool
) -> list[tuple[Piece, list[float]]]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed.init_distributed("gloo", verbose=False)
    exchange = Exchange(torch.distributed.group.WORLD, dtype, torch.device("cpu"), scatter=True)
    assert exchange.needs_no_padding and not exchange._scatter, "gloo's own reduce-scatter is slow"
    assert not exchange._launches_are_dear, "on the CPU a pass over the bucket is dearer"
    exchange._scatter, exchange.needs_no_padding = collective == "reduce_scatter", collective == "parts"
    exchange._launches_are_dear = few_launches
    exchange._buffer = torch.full((200,), torch.nan, dtype=dtype)  # what is not written must not be reduced
    grads = _grads(torch.distributed.get_rank())
    averages = [(piece, average.tolist()) for piece, average in exchange.average(bucket, grads, whole)]
    unwritten = exchange._buffer.isnan()
    assert not unwritten[: unwritten.logical_not().sum()].any(), "a gap in the bucket was reduced as it was"
    return averages


@pytest.mark.parametrize("few_launches", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("collective", ["reduce_scatter", "parts", "all_reduce"])
@pytest.mark.parametrize("cut", ["uneven", "even", "whole"])
def test_all_collectives_average(
    ranks2: Any, dtype: torch.dtype, collective: str, cut: str, few_launches: bool
) -> None:
    left, right = [Piece(0, 0, 15), Piece(1, 2, 3)], [Piece(2, 1, 14), Piece(1, 0, 2)]
    if cut == "uneven":
        right.pop()
    elif cut == "whole":  # the second rank has less of the first two, and rank 0 no gradient for one of them
        left, right = [Piece(0, 0, 8), Piece(1, 0, 4), Piece(2, 0, 8)], [Piece(0, 8, 7), Piece(1, 4, 3), Piece(2, 8, 8)]
    both = [_grads(0), _grads(1)]
    answers = ranks2.run(_averages, dtype, collective, [left, right], cut == "whole", few_launches)
    for pieces, got in zip((left, right), answers, strict=True):
        assert [piece for piece, _ in got] == pieces
        for piece, average in got:
            parts = [g[piece.param].view(-1)[piece.start :][: piece.numel] for g in both if piece.param in g]
            assert average == (torch.stack(parts).sum(0) / 2).tolist()


def _averages_in_place(dtype: torch.dtype, bucket: Bucket) -> list[float]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed.init_distributed("gloo", verbose=False)
    rank = torch.distributed.get_rank()
    exchange = Exchange(torch.distributed.group.WORLD, dtype, torch.device("cpu"), scatter=True)
    place = torch.full((sum(piece.numel for piece in bucket[rank]),), torch.nan, dtype=dtype)
    grads = _grads(rank)
    kept = {index: grad.clone() for index, grad in grads.items()}
    exchange.average_into(place, bucket, grads)
    assert all(torch.equal(grad, kept[index]) for index, grad in grads.items())
    return place.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("one_has_all", [False, True])
def test_an_average_is_made_in_its_place(ranks2: Any, dtype: torch.dtype, one_has_all: bool) -> None:
    left, right = [Piece(0, 0, 15), Piece(1, 2, 3)], [Piece(2, 1, 14), Piece(1, 0, 2)]
    if one_has_all:
        left, right = [*left, *right], []
    both = [_grads(0), _grads(1)]
    for pieces, got in zip((left, right), ranks2.run(_averages_in_place, dtype, [left, right]), strict=True):
        wanted = [
            sum(g[index].view(-1)[start:][:numel] if index in g else torch.zeros(numel) for g in both) / 2
            for index, start, numel in pieces
        ]
        assert got == torch.cat(wanted or [torch.empty(0)]).tolist()


def test_the_budget_goes_to_collectives_per_byte() -> None:
    # In the order of backward: 10, 90 | 60 | 100 | 30: buckets of 100 bytes, but 60 and 100 do not fit together.
    sizes = [30, 100, 60, 90, 10]
    assert within_budget(sizes, 100, 30) == {0}
    assert within_budget(sizes, 100, 90) == {0, 2}
    assert within_budget(sizes, 100, 1000) == {0, 1, 2, 3, 4}
    assert within_budget([0, 5, 0], 100, 4) == set()


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 80), st.integers(1, 400))
def test_the_budget_is_kept_and_used(sizes: list[int], bucket: int, budget: int) -> None:
    chosen = within_budget(sizes, bucket, budget)
    spent = sum(sizes[index] for index in chosen)
    assert spent <= budget
    rest = [size for index, size in enumerate(sizes) if size and index not in chosen]
    assert all(size > budget - spent for size in rest)


def test_neighbours_in_bucket_and_partition_are_one_stretch() -> None:
    places = {0: (0, 5, 0), 1: (0, 0, 10), 2: (1, 0, 0), 3: (1, 0, 50)}  # piece 0 begins at element 5 of its parameter
    pieces = [Piece(0, 5, 4), Piece(0, 9, 6), Piece(1, 0, 3), Piece(2, 0, 2), Piece(3, 1, 7), Piece(3, 8, 1)]
    got = [(group, there, here, numel, members) for group, there, here, numel, members in stretches(pieces, places)]
    assert got == [(0, 0, 0, 13, pieces[:3]), (1, 0, 13, 2, pieces[3:4]), (1, 51, 15, 8, pieces[4:])]
    assert list(stretches([], places)) == []
