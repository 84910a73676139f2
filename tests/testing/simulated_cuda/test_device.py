"""What the device does as CUDA does: devices, errors, random numbers, memory, events, collectives."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zeroplus.testing import RankPool
from lightning_zeroplus.testing.simulated_cuda import record


def error(function: Callable[[], Any]) -> str:
    """The message of the exception that ``function`` raises; empty if it raises none."""
    try:
        function()
    except (RuntimeError, ValueError) as raised:
        return str(raised)
    return ""


def _what_is_seen() -> dict[str, Any]:
    return {
        "available": torch.cuda.is_available(),
        "devices": torch.cuda.device_count(),
        "current": torch.cuda.current_device() - int(os.environ["LOCAL_RANK"]),
        "backend": dist.get_backend(),
        "accelerator": os.environ["DS_ACCELERATOR"],
        "tensor": torch.ones(2, device="cuda").device.index - dist.get_rank(),
    }


def test_each_rank_sees_all_devices_and_its_own_is_current(cuda_ranks: RankPool) -> None:
    seen = {"available": True, "devices": 2, "current": 0, "backend": "nccl", "accelerator": "cuda", "tensor": 0}
    assert cuda_ranks.run(_what_is_seen) == [seen, seen]


def _wrong_devices() -> list[str]:
    mine, other = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    host = torch.ones(3)
    cases: list[Callable[[], Any]] = [
        lambda: mine + other,
        lambda: mine + host,
        lambda: host.add_(mine),
        lambda: torch.mm(mine[None], host[:, None]),
        lambda: torch.ones(1, device="cuda:2"),
        lambda: mine.sum() * 2 + torch.tensor(1.0),  # a scalar of the host is allowed
        lambda: mine[torch.tensor([0, 1])],  # so are indices
    ]
    return [error(case) for case in cases]


def test_tensors_of_different_devices_do_not_mix(cuda_ranks: RankPool) -> None:
    *mixed, ordinal, scalar, indices = cuda_ranks.run(_wrong_devices)[0]
    assert all("Expected all tensors to be on the same device" in message for message in mixed), mixed
    assert "invalid device ordinal" in ordinal
    assert scalar == indices == ""


def _results(device: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(2))
    attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 4, 4)
    net, attention, x = net.to(device), attention.to(device), x.to(device)
    loss = attention(net(x)).square().mean() + nn.functional.cross_entropy(
        net(x).mean(2), torch.tensor([1, 3]).to(device)
    )
    loss.backward()
    params = [*net.parameters(), *attention.parameters()]
    norm = nn.utils.clip_grad_norm_(params, 0.1)
    torch.optim.SGD(params, lr=0.1, fused=True).step()
    view = torch.arange(12, device=device).view(3, 4)[:, 1:3].t().contiguous()
    picked = x[x > 0], x.nonzero(), torch.cat([x, x], 1), x.topk(2).values, x.unique()
    return [tensor.detach().cpu() for tensor in (loss, norm, view, *picked, *params, *net.buffers())]


def test_results_are_those_of_the_cpu(cuda_ranks: RankPool) -> None:
    on_cuda, on_cpu = cuda_ranks.run(_results, "cuda")[0], cuda_ranks.run(_results, "cpu")[0]
    assert len(on_cuda) > 20
    # Attention is computed in parts on the device, and by a fused kernel on the CPU.
    for got, want in zip(on_cuda, on_cpu, strict=True):
        torch.testing.assert_close(got, want)


def _autocast() -> tuple[torch.dtype, torch.dtype]:
    net = nn.Linear(4, 4).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        output = net(torch.ones(2, 4, device="cuda"))
    output.float().sum().backward()
    assert net.weight.grad is not None
    return output.dtype, net.weight.grad.dtype


def test_autocast_is_cudas(cuda_ranks: RankPool) -> None:
    assert cuda_ranks.run(_autocast)[0] == (torch.bfloat16, torch.float32)


def _random() -> dict[str, bool]:
    def draws() -> Tensor:
        ones = torch.ones(8, device="cuda")
        return torch.cat([torch.rand(8, device="cuda"), torch.randn(8, device="cuda"), nn.functional.dropout(ones)])

    torch.cuda.manual_seed(3)
    host = torch.get_rng_state()
    first, state = draws(), torch.cuda.get_rng_state()
    second = draws()
    torch.cuda.set_rng_state(state)
    replayed = draws()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        forked = draws()
    after = draws()
    torch.cuda.manual_seed(3)
    other = torch.device("cuda", 1 - torch.cuda.current_device())
    torch.rand(8, device=other)
    own = torch.rand(4, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    again = torch.rand(4, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    return {
        "a seed repeats": torch.equal(first, draws()),
        "numbers go on": not torch.equal(first, second),
        "a state replays": torch.equal(second, replayed),
        "fork_rng restores": torch.equal(forked, after),
        "generators of one's own": torch.equal(own, again),
        "the host's numbers are others": torch.equal(host, torch.get_rng_state()),
        "a host's generator is refused": "generator"
        in error(lambda: torch.rand(2, device="cuda", generator=torch.Generator())),
        "the state has CUDA's size": state.numel() == 16,
    }


def test_random_numbers_of_the_device(cuda_ranks: RankPool) -> None:
    results = cuda_ranks.run(_random)[0]
    assert all(results.values()), results


def _checkpointed(reentrant: bool) -> bool:
    """Activation checkpointing replays the dropout of the device."""
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)).cuda(),
        torch.ones(4, 8, device="cuda", requires_grad=True),
    )
    torch.cuda.manual_seed(1)
    (want,) = torch.autograd.grad(net(x).square().sum(), x)
    torch.cuda.manual_seed(1)
    output = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=reentrant)
    torch.rand(5, device="cuda")
    output.square().sum().backward()
    assert x.grad is not None
    return torch.equal(x.grad, want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_replays_dropout(cuda_ranks: RankPool, reentrant: bool) -> None:
    assert cuda_ranks.run(_checkpointed, reentrant) == [True, True]


def _memory() -> dict[str, Any]:
    before = torch.cuda.memory_allocated()
    kept = torch.empty(1000, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    del kept
    freed = torch.cuda.memory_allocated() - before
    big = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    peak = torch.cuda.max_memory_allocated() - before
    big.untyped_storage().resize_(0)
    shrunk = torch.cuda.memory_allocated() - before
    use = error(lambda: big.sum())
    big.untyped_storage().resize_(1 << 20)
    unwritten = torch.empty(3, device="cuda").isnan().all().item()
    clone = big.untyped_storage().clone()
    return {
        "freed": freed,
        "peak": peak,
        "shrunk": shrunk,
        "use": "illegal memory access" in use,
        "unwritten memory is NaN": unwritten,
        "storages": clone.device == big.device and torch.UntypedStorage(8, device="cuda:1").device.index == 1,
        "stats": torch.cuda.memory_stats()["allocated_bytes.all.peak"] >= 1 << 20,
        "summary": "CUDA memory summary" in torch.cuda.memory_summary(),
    }


def test_memory_is_counted_and_given_back(cuda_ranks: RankPool) -> None:
    results = cuda_ranks.run(_memory)[0]
    assert results.pop("freed") == 0 and results.pop("shrunk") == 0
    assert results.pop("peak") == 1 << 20
    assert all(results.values()), results


def _events() -> dict[str, Any]:
    side = torch.cuda.Stream()
    start, end, untimed = (torch.cuda.Event(enable_timing=timed) for timed in (True, True, False))
    unrecorded = error(lambda: start.elapsed_time(end))
    start.record()
    with torch.cuda.stream(side):
        within = torch.cuda.current_stream() == side
        end.record()
    return {
        "current": within and torch.cuda.current_stream() == torch.cuda.default_stream(),
        "time": start.elapsed_time(end) > 0,
        "unrecorded": "recorded" in unrecorded,
        "untimed": "enable_timing" in error(lambda: start.elapsed_time(untimed)),
        "other device": torch.cuda.current_stream("cuda:1").device_index == 1,
    }


def test_streams_and_events(cuda_ranks: RankPool) -> None:
    results = cuda_ranks.run(_events)[0]
    assert all(results.values()), results


def _collectives() -> dict[str, Any]:
    rank, device = dist.get_rank(), torch.cuda.current_device()
    mine = torch.arange(4.0, device="cuda") + rank
    mean, gathered, part = mine.clone(), torch.empty(8, device="cuda"), torch.empty(2, device="cuda")
    with record() as log:
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        dist.all_gather_into_tensor(gathered, mine)
        work = dist.reduce_scatter_tensor(part, mine.clone(), async_op=True)
        work.wait()
    return {
        "average": mean.tolist() == [0.5, 1.5, 2.5, 3.5],
        "gathered": gathered.tolist() == [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0],
        "part": part.tolist() == ([1.0, 3.0] if rank == 0 else [5.0, 7.0]),
        "counted": sum(log.collectives().values()) == 3,
        "not host waits": not log.host_synchronizations(),
        "on the host": "No backend type associated with device type cpu"
        in error(lambda: dist.all_reduce(torch.ones(2))),
        "gloo": "device type cuda" in error(lambda: dist.all_reduce(mine, group=dist.new_group(backend="gloo"))),
        "wrong device": "cuda" in error(lambda: dist.all_reduce(torch.ones(2, device=f"cuda:{1 - device}"))),
        "not contiguous": "contiguous" in error(lambda: dist.all_reduce(torch.ones(4, 4, device="cuda")[:, 1])),
    }


def test_collectives_have_nccls_rules(cuda_ranks: RankPool) -> None:
    for results in cuda_ranks.run(_collectives):
        assert all(results.values()), results


def _one_device_for_all() -> str:
    group = dist.new_group([0, 1])
    torch.cuda.set_device(0)
    try:
        return error(lambda: dist.all_reduce(torch.ones(2, device="cuda"), group=group))
    finally:
        torch.cuda.set_device(dist.get_rank())


def test_ranks_that_share_a_device_are_refused(cuda_ranks: RankPool) -> None:
    assert all("Duplicate GPU detected" in message for message in cuda_ranks.run(_one_device_for_all))


def _synchronizations() -> dict[str, dict[str, int]]:
    x, host = torch.ones(8, device="cuda"), torch.ones(8)
    pinned, side, event = torch.ones(8).pin_memory(), torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    cases: dict[str, Callable[[], Any]] = {
        "item": lambda: x[0].item(),
        "bool": lambda: bool(x[0] > 0),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[x > 0],
        "to the host": lambda: x.cpu(),
        "pageable": lambda: x.copy_(host, non_blocking=True),
        "pinned": lambda: x.copy_(pinned, non_blocking=True),
        "pinned, blocking": lambda: x.copy_(pinned),
        "to pinned": lambda: pinned.copy_(x, non_blocking=True),
        "new on the device": lambda: torch.tensor([1.0, 2.0], device="cuda"),
        "stream": side.synchronize,
        "event": event.synchronize,
        "device": torch.cuda.synchronize,
        "kernels": lambda: torch._foreach_add_([x, x], 1.0),
        "wait": lambda: side.wait_stream(torch.cuda.current_stream()),
    }
    counts = {}
    for name, case in cases.items():
        with record() as log:
            case()
        counts[name] = sum(log.host_synchronizations().values())
    return counts


def test_host_synchronizations_are_counted(cuda_ranks: RankPool) -> None:
    counts = cuda_ranks.run(_synchronizations)[0]
    none = {"pinned", "to pinned", "kernels", "wait"}
    assert counts == {name: int(name not in none) for name in counts}, counts


def _located() -> list[str]:
    with record(locations=True) as log:
        torch.ones(2, device="cuda").sum().item()
    return [str(place.location) for place in log.host_synchronizations()]


def test_a_synchronization_is_located(cuda_ranks: RankPool) -> None:
    (place,) = cuda_ranks.run(_located)[0]
    assert place.startswith("simulated_cuda/test_device.py:") and place.endswith(" _located")


def _versions_of_a_foreach_write() -> tuple[int, int]:
    x = torch.zeros(4, device="cuda")
    before = x._version
    with torch.no_grad():
        torch._foreach_add_([x], 1.0)
    return before, x._version


def test_what_foreach_kernels_write_is_counted(cuda_ranks: RankPool) -> None:
    """CUDA's kernels tell autograd; the CPU's do so through the operators that they call."""
    for before, after in cuda_ranks.run(_versions_of_a_foreach_write):
        assert after == before + 1
