"""Deferred weight gradients under FSDP2: precision, collectives, memory and time, on two CPU ranks.

::

    python benchmarks/deferred_wgrad.py
    python benchmarks/deferred_wgrad.py --micro-batches 8 --width 512

Precision: the reduced gradient after 1, 8 and 64 bf16 micro-batches against the sum in fp64 of what each micro-batch
gives. *Ours* is autograd accumulating in fp32; *late casts* keeps deferred sums in bf16 until FSDP2's own accumulators
take them at the end; *FSDP2* defers nothing. Memory: what the store keeps alive, at most. Time: a pipeline of two
stages, one per rank, each an FSDP2 module of its own; forwards first, then backwards. With deferral the second stage
sends the gradient of its input before it computes those of its weights.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_zeroplus import DeferredLinear, WeightGradStore
from lightning_zeroplus.fsdp.drain import Drain
from lightning_zeroplus.fsdp.late_grads import parameters
from lightning_zeroplus.fsdp.units import Units
from lightning_zeroplus.testing import RankPool

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Block(nn.Module):
    """Two linear layers around an activation, and a residual connection."""

    def __init__(self, width: int, store: WeightGradStore | None) -> None:
        super().__init__()
        self.up = DeferredLinear(width, 2 * width, store=store)
        self.down = DeferredLinear(2 * width, width, store=store)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Row(NamedTuple):
    """One way of one micro-batch count: see the module's docstring."""

    way: str
    micro_batches: int
    error: float
    reduce_scatters: int
    held_mib: float


class CountedReduceScatter:
    """FSDP2's reduce-scatter, counted."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def make(width: int, blocks: int, store: WeightGradStore | None, mesh: DeviceMesh | None) -> Any:
    """The same model on every rank; without a mesh in bf16 and in one piece."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, store) for _ in range(blocks)))
    if mesh is None:
        return model.bfloat16()
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=BF16)
    return fully_shard(model, mesh=mesh, mp_policy=BF16)


def batch(rank: int, index: int, rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 * rank + index))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def reference(micro_batches: int, width: int, rows: int) -> list[Tensor]:
    model = make(width, 2, None, None)
    sums = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
    for rank in range(dist.get_world_size()):
        for index in range(micro_batches):
            loss(model, batch(rank, index, rows, width).bfloat16()).backward()
            for param, total in zip(model.parameters(), sums, strict=True):
                assert param.grad is not None
                total += param.grad.double() / dist.get_world_size()
                param.grad = None
    return sums


def precision(way: str, micro_batches: int, width: int, rows: int, want: list[Tensor]) -> Row:
    limit = 2**20 if way == "ours, max_bytes 1 MiB" else None
    store = None if way == "FSDP2" else WeightGradStore(limit)
    model = make(width, 2, store, init_device_mesh("cpu", (dist.get_world_size(),)))
    counted = CountedReduceScatter()
    for unit in model:
        unit.set_custom_reduce_scatter(counted)
    units = Units(model) if way.startswith("ours") else None
    if units is not None and store is not None:
        Drain(units, store)
    held = 0
    for index in range(micro_batches):
        last = index == micro_batches - 1
        units.set_sync(last) if units is not None else model.set_requires_gradient_sync(last and way == "FSDP2")
        with store.defer() if store is not None else contextlib.nullcontext():
            value = loss(model, batch(dist.get_rank(), index, rows, width))
            value.backward()
        held = max(held, store.nbytes if store is not None else 0)
    if way == "late casts":
        assert store is not None
        store.flush()
        for unit in model:
            for param in parameters(unit):
                param.accumulate_unsharded_grad_if_needed()  # in this order: the other replaces an accumulator
                param.to_accumulated_grad_if_needed()
        model.set_requires_gradient_sync(True)
        fully_shard.state(model)._root_post_backward_final_callback()  # type: ignore[attr-defined]
    got = [param.grad.full_tensor().double() for param in model.parameters()]
    error = max(float((g - w).norm() / w.norm()) for g, w in zip(got, want, strict=True))
    return Row(way, micro_batches, error, counted.calls, held / 2**20)


def precisions(width: int, rows: int) -> list[Row]:
    found = []
    for micro_batches in (1, 8, 64):
        want = reference(micro_batches, width, rows)
        for way in ("FSDP2", "late casts", "ours", "ours, max_bytes 1 MiB"):
            found.append(precision(way, micro_batches, width, rows, want))
    return found


class Stage:
    """One stage of the pipeline, on one rank."""

    def __init__(self, model: Any, store: WeightGradStore | None, shape: tuple[int, int], micro_batches: int) -> None:
        self.model, self.store, self.shape, self.micro_batches = model, store, shape, micro_batches
        self.units = Units(model)

    def step(self) -> None:
        """Forwards, backwards, and the reduction."""
        self.units.set_sync(False)
        with self.store.defer() if self.store is not None else contextlib.nullcontext():
            pending = [self._forward(index) for index in range(self.micro_batches)]
            for x, y in pending:
                self._backward(x, y)
        if self.store is not None:
            self.store.flush()
        self.units.reduce()
        self.units.drop()

    def _forward(self, index: int) -> tuple[Tensor, Tensor]:
        if dist.get_rank() == 0:
            x = batch(0, index, *self.shape)
            y = self.model(x)
            dist.send(y.detach(), 1)
            return x, y
        x = torch.empty(self.shape, dtype=torch.bfloat16)
        dist.recv(x, 0)
        return x, self.model(x.requires_grad_())

    def _backward(self, x: Tensor, y: Tensor) -> None:
        if dist.get_rank() == 1:
            y.float().square().mean().backward()
            assert x.grad is not None
            dist.send(x.grad, 0)
            return
        dy = torch.empty_like(y)
        dist.recv(dy, 1)
        y.backward(dy)
        if self.store is not None:
            self.store.flush()  # the next gradient is on its way


def pipeline(width: int, blocks: int, rows: int, micro_batches: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per step of both ways, interleaved, on this rank."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))["shard"]
    stages = {
        way: Stage(make(width, blocks, store, mesh), store, (rows, width), micro_batches)
        for way, store in (("FSDP2", None), ("deferred", WeightGradStore()))
    }
    seconds: dict[str, list[float]] = {way: [] for way in stages}
    for index in range(rounds + 2):
        for way, stage in stages.items():
            dist.barrier()
            start = time.perf_counter()
            stage.step()
            dist.barrier()
            if index >= 2:  # after warming up
                seconds[way].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rows", type=int, default=256, help="rows of a micro-batch in the pipeline")
    parser.add_argument("--blocks", type=int, default=2, help="blocks per stage")
    parser.add_argument("--micro-batches", type=int, default=4, help="per step of the pipeline")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    with RankPool(2, timeout=600) as ranks:
        rows = ranks.run(precisions, 128, 64)[0]
        print(f"{'':24}{'micro-batches':>14}{'error':>10}{'reduce-scatters':>17}{'MiB held':>10}")
        for row in rows:
            print(
                f"{row.way:24}{row.micro_batches:>14}{row.error:>10.1e}{row.reduce_scatters:>17}{row.held_mib:>10.2f}"
            )
        seconds = ranks.run(
            pipeline, arguments.width, arguments.blocks, arguments.rows, arguments.micro_batches, arguments.rounds
        )[0]
        medians = {way: statistics.median(each) for way, each in seconds.items()}
        for way, median in medians.items():
            print(f"pipeline of 2 stages, {way:10} {median:.3f} s/step ({median / medians['FSDP2']:.2f})")


if __name__ == "__main__":
    main()
