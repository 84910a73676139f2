"""Races between streams, and between a stream and the host: found, and not found where a wait orders them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lightning_zeroplus.testing import RankPool
from lightning_zeroplus.testing.simulated_cuda import Log, SimulatedCudaError, record


def _two_streams(ordered: bool) -> Log:
    with record(locations=True) as log:
        side, x = torch.cuda.Stream(), torch.ones(8, device="cuda")
        if ordered:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        torch.cuda.current_stream().wait_stream(side)
    return log


def _halves(overlap: int) -> Log:
    with record() as log:
        side, x = torch.cuda.Stream(), torch.zeros(8, 8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        x[:, :4].add_(1)
        with torch.cuda.stream(side):
            x[:, 4 - overlap :].add_(1)
    return log


def _freed(ordered: bool) -> Log:
    with record() as log:
        side, x = torch.cuda.Stream(), torch.ones(1024, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.sum()
        if ordered:
            x.record_stream(side)
        del x
        torch.ones(1024, device="cuda")
    return log


def _shrunk(ordered: bool) -> Log:
    """As a weight that is resharded while another stream still computes with it."""
    with record() as log:
        side, x = torch.cuda.Stream(), torch.ones(1024, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.sum()
        if ordered:
            torch.cuda.current_stream().wait_stream(side)
        x.untyped_storage().resize_(0)
        torch.ones(1024, device="cuda")
    return log


def _pinned_write(ordered: bool) -> Log:
    pinned, x = torch.ones(8).pin_memory(), torch.empty(8, device="cuda")
    with record() as log:
        x.copy_(pinned, non_blocking=True)
        if ordered:
            torch.cuda.current_stream().synchronize()
        pinned.fill_(2)
    return log


def _pinned_read(ordered: bool) -> Log:
    pinned, x = torch.ones(8).pin_memory(), torch.zeros(8, device="cuda")
    with record() as log:
        pinned.copy_(x, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        if ordered:
            event.synchronize()
        pinned.sum()
    return log


def _round_trip() -> Log:
    """Copies of one stream to pinned memory and back are in order: the host does nothing itself."""
    pinned, x = torch.ones(8).pin_memory(), torch.zeros(8, device="cuda")
    with record() as log:
        for _ in range(2):
            x.copy_(pinned, non_blocking=True)
            x.add_(1)
            pinned.copy_(x, non_blocking=True)
    return log


def _collective(ordered: bool) -> Log:
    x = torch.ones(8, device="cuda")
    with record() as log:
        work = dist.all_reduce(x, async_op=True)
        if ordered:
            work.wait()
        x.add_(1)
    return log


def _autograd(ordered: bool) -> Log:
    """A hook runs on the stream of its node's forward, in a thread of the device."""
    side, weight = torch.cuda.Stream(), torch.ones(8, device="cuda", requires_grad=True)
    total = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with record() as log:
        with torch.cuda.stream(side):
            y = weight * 2
        torch.cuda.current_stream().wait_stream(side)
        y.register_hook(lambda grad: total.add_(grad))  # on the side stream
        y.sum().backward()
        if not ordered:
            with torch.cuda.stream(torch.cuda.Stream()):
                total.add_(1)
        else:
            total.add_(1)  # autograd makes the stream of the call wait for its streams
    return log


_CASES = {
    "two streams": _two_streams,
    "memory that is freed": _freed,
    "memory that is given back": _shrunk,
    "pinned memory that is written": _pinned_write,
    "pinned memory that is read": _pinned_read,
    "a collective": _collective,
    "a gradient hook": _autograd,
}


def _races(case: Callable[[bool], Log], ordered: bool) -> list[str]:
    return [str(race) for race in case(ordered).races()]


@pytest.mark.parametrize("name", _CASES)
def test_a_race_is_found_and_an_order_is_seen(cuda_ranks: RankPool, name: str) -> None:
    assert all(cuda_ranks.run(_races, _CASES[name], False)), "no race was found"
    assert not any(cuda_ranks.run(_races, _CASES[name], True)), "what is ordered is no race"


def test_columns_of_one_matrix_are_different_memory(cuda_ranks: RankPool) -> None:
    assert cuda_ranks.run(_races, _halves, 0)[0] == []
    assert cuda_ranks.run(_races, _halves, 1)[0] != []


def _races_of_round_trip() -> list[str]:
    return [str(race) for race in _round_trip().races()]


def test_copies_of_one_stream_are_in_order(cuda_ranks: RankPool) -> None:
    assert cuda_ranks.run(_races_of_round_trip)[0] == []


def _reported() -> tuple[str, int]:
    log = _two_streams(True)
    waits = len(log.races(ignore=lambda entry: entry.kind == "wait_event"))
    try:
        _two_streams(False).check()
    except AssertionError as found:
        return str(found), waits
    return "", waits


def test_the_report_names_both_places(cuda_ranks: RankPool) -> None:
    report, waits = cuda_ranks.run(_reported)[0]
    assert "write-write of 32 bytes allocated at simulated_cuda/test_races.py" in report
    assert "on the default stream of cuda:0" in report and report.count(" _two_streams") >= 3
    assert waits, "without its wait the ordered program races"


def _nested() -> str:
    with record():
        try:
            with record():
                return ""
        except SimulatedCudaError as error:
            return str(error)


def test_logs_do_not_nest(cuda_ranks: RankPool) -> None:
    assert "cannot be nested" in cuda_ranks.run(_nested)[0]


def test_without_the_device_there_is_no_log() -> None:
    with pytest.raises(SimulatedCudaError, match="no simulated CUDA device.*RankPool"), record():
        pass


def _unordered_but_for(what: str) -> tuple[bool, list[str]]:
    """Write on one stream, let the host do something, and read on another stream that waits for nobody."""
    x, batch = torch.ones(8, device="cuda"), torch.ones(8)
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    with record() as log:
        x.add_(1)
        event.record()
        over = event.query()
        if what == "copies":
            batch.to("cuda", non_blocking=True)
        elif what == "waits":
            event.synchronize()
            over = event.query()
        elif what == "asks on":
            while not over:
                over = event.query()
        with torch.cuda.stream(side):
            x.sum()
    return over, [str(race) for race in log.races()]


@pytest.mark.parametrize(("what", "over"), [("asks", False), ("copies", False), ("waits", True), ("asks on", True)])
def test_a_question_and_a_copy_from_pageable_memory_order_nothing(cuda_ranks: RankPool, what: str, over: bool) -> None:
    """Both are what a GPU may answer or do; an H200 did, and stage 3 was wrong."""
    for answer, races in cuda_ranks.run(_unordered_but_for, what):
        assert answer is over and bool(races) is not over


def _view_of_what_is_written() -> list[str]:
    x, side = torch.ones(8, 2, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with record() as log:
        x.add_(1)
        with torch.cuda.stream(side):
            torch.view_as_complex(x)
    return [str(race) for race in log.races()]


def test_a_view_reads_nothing(cuda_ranks: RankPool) -> None:
    assert cuda_ranks.run(_view_of_what_is_written) == [[], []]
