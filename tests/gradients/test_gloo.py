"""The collectives made of gloo's: sums of parts of any length, and gathers."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zeroplus.engine.gathering import on_gloo
from lightning_zeroplus.fsdp.gloo_comms import GlooAllGather, GlooReduceScatter
from lightning_zeroplus.gradients.ranks import gloo
from lightning_zeroplus.weights.holders import holders


def _flat(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _reduced(widths: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    rank = dist.get_rank()
    assert gloo.suits(dist.group.WORLD, torch.device("cpu"))
    flat = _flat(rank, sum(widths), dtype)
    part = gloo.reduction.reduce_parts(flat, widths, dist.group.WORLD)
    out = torch.empty(widths[rank], dtype=dtype)
    gloo.reduction.reduce_parts(_flat(rank, sum(widths), dtype), widths, dist.group.WORLD, out=out)
    parts = list(_flat(rank, sum(widths), dtype).split(widths))
    own = parts.pop(rank)
    gloo.reduction.add_parts((own, torch.cat(parts)), widths, dist.group.WORLD)
    total = _flat(rank, sum(widths), dtype)
    dist.all_reduce(total)
    return part, out, own, total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [[7, 3], [0, 5], [4, 4]])
def test_two_ranks_get_the_bits_of_an_all_reduce(ranks2: Any, widths: list[int], dtype: torch.dtype) -> None:
    for rank, (*parts, total) in enumerate(ranks2.run(_reduced, widths, dtype)):
        expected = total.split(widths)[rank]
        assert all(torch.equal(part, expected) for part in parts)


def _gathered(widths: list[int]) -> list[Tensor]:
    rank = dist.get_rank()
    parts = [torch.full((width,), float(rank)) for width in widths]
    gloo.gather_parts(parts, dist.group.WORLD)
    return parts


@pytest.mark.parametrize("widths", [[7, 3], [0, 5]])
def test_all_ranks_get_all_parts(ranks2: Any, widths: list[int]) -> None:
    for parts in ranks2.run(_gathered, widths):
        assert [part.tolist() for part in parts] == [[float(rank)] * width for rank, width in enumerate(widths)]


def _holders_after_gathers(times: int) -> int:
    """How many weights seem to be somebody else's after they have been gathered."""
    found = 0
    for _ in range(times):
        whole = torch.empty(2)
        on_gloo._all_gather(torch.ones(1), whole, dist.group.WORLD).wait()
        found += holders(whole) > 1
    return found


def test_gloo_does_not_hold_what_it_gathers(ranks2: Any) -> None:
    # Of a thousand tensors that gloo is given themselves, its threads hold 30 to 180 for a little while.
    assert ranks2.run(_holders_after_gathers, 1000) == [0, 0]


def _dropped_gathers() -> list[bool]:
    """Whether the memory of a gather that nobody waits for is there, and whether it is when the next one is dropped."""
    parts = [torch.ones(1 << 16) for _ in range(2)]
    part = weakref.ref(parts[0])
    gather = gloo.Gather(parts, dist.group.WORLD)
    works = list(gather._works)
    del gather, parts
    found = [part() is not None]
    for work in works:
        work.wait()
    gather = gloo.Gather([torch.ones(1), torch.ones(1)], dist.group.WORLD)
    del gather
    dist.barrier()
    return [*found, part() is not None]


def test_the_memory_of_a_gather_that_is_dropped_lives_until_it_is_over(ranks2: Any) -> None:
    assert ranks2.run(_dropped_gathers) == [[True, False]] * 2


def _as_fsdp2_calls(average: bool) -> tuple[Tensor, Tensor]:
    rank, world = dist.get_rank(), dist.group.WORLD
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    part, everything = torch.empty(4), torch.empty(8)
    GlooReduceScatter()(part, _flat(rank, 8, torch.float32), world, op)
    GlooAllGather()(everything, part, world)
    return part, everything


@pytest.mark.parametrize("average", [True, False])
def test_collectives_of_fsdp2(ranks2: Any, average: bool) -> None:
    total = (_flat(0, 8, torch.float32) + _flat(1, 8, torch.float32)) / (2 if average else 1)
    for rank, (part, everything) in enumerate(ranks2.run(_as_fsdp2_calls, average)):
        assert torch.equal(part, total.chunk(2)[rank]) and torch.equal(everything, total)


def _of_a_middle_rank() -> Tensor:
    widths, rank = [2, 3, 1], dist.get_rank()
    parts = list(_flat(rank, 6, torch.float32).split(widths))
    own = parts.pop(rank).clone()
    gloo.reduction.add_parts((own, torch.cat(parts)), widths, dist.group.WORLD)
    part = gloo.reduction.reduce_parts(_flat(rank, 6, torch.float32), widths, dist.group.WORLD)
    assert torch.equal(own, part)
    return part


@pytest.mark.thorough
def test_three_ranks_sum_the_same_in_every_run(ranks: Any) -> None:
    pool = ranks(3)
    first, second = pool.run(_of_a_middle_rank), pool.run(_of_a_middle_rank)
    flats = [_flat(rank, 6, torch.float32).double() for rank in range(3)]
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    torch.testing.assert_close(torch.cat(first), torch.stack(flats).sum(0).float(), rtol=1e-6, atol=1e-6)
