from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lightning_zeroplus.testing import RankPool
from lightning_zeroplus.testing.streams import Race, StreamSanitizer


def reduce_then_write(wait: str) -> list[Race]:
    with StreamSanitizer() as sanitizer:
        tensor = torch.ones(4)
        if wait == "sync":
            dist.all_reduce(tensor)
        else:
            work = dist.all_reduce(tensor, async_op=True)
            side = sanitizer.stream("side")
            if wait == "current":
                work.wait()
            elif wait == "other stream":
                with sanitizer.on(side):
                    work.wait()
        tensor.mul_(2)
    return sanitizer.races


@pytest.mark.parametrize(("wait", "races"), [("sync", 0), ("current", 0), ("other stream", 1), ("nobody", 1)])
def test_a_collective_is_over_for_the_stream_that_waited(ranks: Callable[[int], RankPool], wait, races) -> None:
    for found in ranks(2).run(reduce_then_write, wait):
        assert [(race.kind, race.first.operation) for race in found] == [("write-write", "c10d::allreduce_")] * races


def write_then_gather(join: bool) -> list[Race]:
    with StreamSanitizer() as sanitizer:
        side = sanitizer.stream("side")
        part, whole = torch.zeros(2), torch.zeros(2 * dist.get_world_size())
        side.wait_stream(sanitizer.device.current)
        with sanitizer.on(side):
            part.add_(1)
        if join:
            sanitizer.device.current.wait_stream(side)
        dist.all_gather_into_tensor(whole, part)
    return sanitizer.races


@pytest.mark.parametrize("join", [True, False])
def test_a_collective_starts_when_the_calling_stream_gets_to_it(ranks: Callable[[int], RankPool], join: bool) -> None:
    for found in ranks(2).run(write_then_gather, join):
        expected = [] if join else [("write-read", "aten::add_", "c10d::_allgather_base_")]
        assert [(race.kind, race.first.operation, race.second.operation) for race in found] == expected


def scatter_async() -> list[Race]:
    with StreamSanitizer() as sanitizer:
        parts, own = torch.ones(2 * dist.get_world_size()), torch.zeros(2)
        work = dist.reduce_scatter_tensor(own, parts, async_op=True)
        parts.sum()  # reads what the collective reads
        own.sum()
        work.wait()
    return sanitizer.races


def test_inputs_are_read_and_outputs_written(ranks: Callable[[int], RankPool]) -> None:
    for found in ranks(2).run(scatter_async):
        assert [(race.kind, race.span) for race in found] == [("write-read", (0, 8))]


def forgotten_wait() -> tuple[list[str], int]:
    def program(drop: str | None) -> StreamSanitizer:
        with StreamSanitizer(drop=drop) as sanitizer:
            tensor = torch.ones(4)
            dist.all_reduce(tensor)
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            tensor.mul_(2)
        return sanitizer

    clean = program(None)
    clean.check()
    (site,) = clean.sites
    return site.split()[:1], len(program(site).races)


def test_a_handles_wait_can_be_dropped_but_not_that_of_a_collective_that_is_not_async(
    ranks: Callable[[int], RankPool],
) -> None:
    assert ranks(2).run(forgotten_wait) == [(["work.wait"], 1)] * 2
