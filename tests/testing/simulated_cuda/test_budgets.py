"""What a step may cost a device; `benchmarks/device_cost.py` prints the same numbers for any settings."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_zeroplus as zp
from lightning_zeroplus.engine.reduction.exchange import Exchange, Piece, by_elements, by_parameters
from lightning_zeroplus.testing import RankPool
from lightning_zeroplus.testing.simulated_cuda import record
from lightning_zeroplus.weights.partitioned.partition import take_over_written
from tests.testing.simulated_cuda.cost import Case, measure

#: Kernels of plain torch for the same step: what the model and its optimizer launch by themselves.
PLAIN = 85
#: By strategy, and whether a window is open: the most kernels beyond plain torch's, collectives, and waits in the step.
BUDGETS: dict[tuple[int | str, bool], tuple[int, int, int]] = {
    (0, False): (8, 1, 0),
    (0, True): (8, 1, 0),
    (1, False): (52, 13, 0),
    (1, True): (52, 13, 0),
    (2, False): (55, 18, 0),
    (2, True): (52, 13, 0),
    (3, False): (68, 21, 0),
    (3, True): (48, 12, 0),
    ("fsdp", False): (26, 4, 0),
    ("fsdp", True): (24, 4, 0),
}


def test_plain_torch(cuda_ranks: RankPool) -> None:
    for cost in cuda_ranks.run(measure, Case(None)):
        assert (cost.kernels, cost.collectives) == (PLAIN, 0)
        assert cost.waits_in_backwards == cost.waits_in_step == 0


@pytest.mark.sampled
@pytest.mark.parametrize(("strategy", "window"), BUDGETS)
def test_a_step_stays_within_its_budget(cuda_ranks: RankPool, strategy: int | str, window: bool) -> None:
    kernels, collectives, waits = BUDGETS[strategy, window]
    for cost in cuda_ranks.run(measure, Case(strategy, window=window)):
        assert PLAIN < cost.kernels <= PLAIN + kernels
        assert 0 < cost.collectives <= collectives
        assert cost.waits_in_backwards == 0, cost.places
        assert cost.waits_in_step <= waits, cost.places


@pytest.mark.parametrize("strategy", [2, 3])
def test_a_window_of_many_backwards_waits_no_longer(cuda_ranks: RankPool, strategy: int) -> None:
    for cost in cuda_ranks.run(measure, Case(strategy, window=True, backwards=16)):
        assert (cost.waits_in_backwards, cost.waits_in_step) == (0, 0), cost.places


_OVERLAP = {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 300}}


@pytest.mark.parametrize("strategy", [1, 2, 3])
def test_overlapped_reductions_and_clipping_wait_for_nothing(cuda_ranks: RankPool, strategy: int) -> None:
    for cost in cuda_ranks.run(measure, Case(strategy, clip=True, config=_OVERLAP)):
        assert (cost.waits_in_backwards, cost.waits_in_step) == (0, 0), cost.places


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_the_norm_decides_only_in_fp16(cuda_ranks: RankPool, strategy: int) -> None:
    """It says whether a gradient is infinite, and is read once."""
    low, half = (cuda_ranks.run(measure, Case(strategy, precision=each)) for each in ("bf16-true", "16-true"))
    for in_low, in_half in zip(low, half, strict=True):
        assert in_low.waits_in_backwards == in_low.waits_in_step == 0, in_low.places
        assert (in_half.waits_in_backwards, in_half.waits_in_step) == (0, 1), in_half.places
        assert in_half.collectives == in_low.collectives


@pytest.mark.parametrize("strategy", [1, 2, 3])
def test_the_peak_of_a_window(cuda_ranks: RankPool, strategy: int) -> None:
    """One full gradient, one bucket, and this rank's half of the averages; a layer more for what autograd works on."""
    width, layers, bucket = 128, 6, 20_000
    full, layer = 4 * (layers * (width * width + width) + 1), 4 * width * (width + 1)
    config = {"zero_optimization": {"reduce_bucket_size": bucket, "stage3_param_persistence_threshold": 10**6}}
    case = Case(strategy, window=True, backwards=3, layers=layers, width=width, config=config)
    for cost in cuda_ranks.run(measure, case):
        assert full < cost.peak_bytes - cost.bytes_before <= full + 4 * bucket + full // 2 + layer


class _Launches(TorchDispatchMode):
    """Counts operators that are not views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "view" not in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cut", [by_parameters, by_elements])
def test_a_flush_launches_no_kernel_per_rank(cut: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """300 parameters, of which each of 64 ranks has a part; only the layout is that of 64 ranks."""
    world, params, numel = 64, 300, 64 * 5 + 3
    part = -(-numel // world)
    starts = [min(rank * part, numel) for rank in range(world + 1)]
    by_param = [
        [Piece(param, start, end - start) for start, end in zip(starts, starts[1:], strict=False)]
        for param in range(params)
    ]
    if cut is by_parameters:
        buckets = list(by_parameters(by_param, 20_000))
    else:  # stages 1 and 2: the flattened parameters, cut into as many partitions as there are ranks
        each = -(-params * numel // world)
        owned = [_range(numel, rank * each, min((rank + 1) * each, params * numel)) for rank in range(world)]
        buckets = list(by_elements(owned, 20_000))
    exchange = object.__new__(Exchange)
    exchange._group, exchange._world, exchange._rank = None, world, 7
    exchange._scatter = exchange.needs_no_padding = False
    exchange.dtype, exchange._device = torch.float32, torch.device("cpu")
    exchange._buffer, exchange._launches_are_dear = torch.empty(0), cut is by_elements
    monkeypatch.setattr("lightning_zeroplus.engine.reduction.exchange.dist.all_reduce", lambda *_, **__: None)
    grads = {param: torch.randn(numel) for param in range(params)}
    with _Launches() as launches:
        for bucket in buckets:
            for piece, average in exchange.average(bucket, grads, by_parameters=cut is by_parameters):
                expected = grads[piece.param][piece.start :][: piece.numel] / world
                assert torch.equal(average, expected)
    checks = 3 * sum(len(bucket[7]) for bucket in buckets)  # a division, a comparison, and what it reads
    assert launches.count - checks <= (2 * params if cut is by_parameters else 5 * len(buckets)) + len(buckets)


def _range(numel: int, start: int, end: int) -> list[Piece]:
    """The pieces of the elements from ``start`` to ``end`` of parameters of ``numel`` elements, laid end to end."""
    pieces = []
    while start < end:
        param, first = divmod(start, numel)
        pieces.append(Piece(param, first, min(numel - first, end - start)))
        start += pieces[-1].numel
    return pieces


@pytest.mark.parametrize("strategy", [2, "fsdp"])
def test_an_audited_step_waits_as_often_for_many_parameters(cuda_ranks: RankPool, strategy: int | str) -> None:
    few, many = (cuda_ranks.run(measure, Case(strategy, layers=layers, audit=True)) for layers in (2, 8))
    for small, large in zip(few, many, strict=True):
        assert large.waits_in_backwards + large.waits_in_step == small.waits_in_backwards + small.waits_in_step
        assert small.waits_in_step <= 8, small.places


def _kernels_of_a_broadcast(norms: int) -> int:
    from lightning_zeroplus.gradients.module_buffers import BufferBroadcast

    net = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(norms))).cuda()
    broadcast = BufferBroadcast(net, torch.device("cuda", torch.cuda.current_device()))
    with record() as log:
        broadcast.before_forward()
    assert sum(log.collectives().values()) == 1 and not log.host_synchronizations()
    return sum(log.kernels().values())


def test_buffers_are_copied_together(cuda_ranks: RankPool) -> None:
    sender, receiver = cuda_ranks.run(_kernels_of_a_broadcast, 2)
    assert receiver == sender + 2, "one copy for fp32 buffers, one for the counts of batches"
    assert cuda_ranks.run(_kernels_of_a_broadcast, 8) == [sender, receiver]


def _waits_of_experts(where: str) -> int:
    layers = [zp.DeferredGroupedLinear(3, 8, 8, device="cuda") for _ in range(2)]
    x, counts = torch.ones(6, 8, device="cuda"), torch.tensor([1, 2, 3]).to(where)
    with record() as log:
        for layer in layers:
            x = layer(x, counts)
        x.sum().backward()
    return sum(log.host_synchronizations().values())


def test_experts_with_counts_on_the_host_do_not_wait(cuda_ranks: RankPool) -> None:
    assert cuda_ranks.run(_waits_of_experts, "cpu") == [0, 0]
    assert cuda_ranks.run(_waits_of_experts, "cuda") == [2, 2]


def _waits_for_written_weights(count: int) -> tuple[int, bool]:
    """Weights that stay gathered on the device, whose partitions are on the host."""
    whole = torch.arange(8.0 * count, device="cuda").view(count, 8)
    params: list[Any] = [nn.Parameter(each) for each in whole]
    for index, param in enumerate(params):
        param.ds_id, param.ds_status, param.ds_numel = index, SimpleNamespace(name="AVAILABLE"), 8
        param.ds_tensor, param.ds_process_group = torch.zeros(4), None
        param.ds_tensor.ds_numel = 4
    with record() as log:
        take_over_written(params, {})
    start = 4 * dist.get_rank()
    same = torch.equal(torch.stack([param.ds_tensor for param in params]), whole.cpu()[:, start : start + 4])
    return sum(log.host_synchronizations().values()), same


def test_written_weights_reach_partitions_on_the_host_with_one_wait(cuda_ranks: RankPool) -> None:
    assert cuda_ranks.run(_waits_for_written_weights, 5) == [(1, True)] * 2


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("strategy", [1, 2])
def test_events_do_not_grow_with_the_parameters(cuda_ranks: RankPool, strategy: int, window: bool) -> None:
    """Nor do launches on buckets: a layer has two gradients, each of which is copied once per reduction."""
    config = {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 10**6}}
    few, many = (
        cuda_ranks.run(measure, Case(strategy, layers=layers, window=window, config=config)) for layers in (4, 16)
    )
    plain = [cuda_ranks.run(measure, Case(None, layers=layers))[0].kernels for layers in (4, 16)]
    for small, large in zip(few, many, strict=True):
        assert large.events == small.events
        assert (large.kernels - plain[1]) - (small.kernels - plain[0]) <= 2 * 2 * (16 - 4)


def _events_of_writers() -> int:
    from lightning_zeroplus.engine.reduction.streams import Writers

    made = 0

    class Counted(torch.cuda.Event):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made += 1
            return super().__new__(cls, *args, **kwargs)

    writers, streams = Writers(), [torch.cuda.Stream() for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Counted)
        for _ in range(4):
            for key in range(20):
                with torch.cuda.stream(streams[key % 3]):
                    writers.wait(key - 1)
                    writers.record(key)
            writers.wait_for_all()
            writers.clear()
    return made


def test_a_stream_has_one_event(cuda_ranks: RankPool) -> None:
    assert cuda_ranks.run(_events_of_writers) == [3, 3]
