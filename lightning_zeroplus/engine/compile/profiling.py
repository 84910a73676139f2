"""Lets upstream's compile passes, with their profiler, run on CPU and gloo."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.compile import backend as upstream_backend
from deepspeed.compile.passes import prefetch, zero3_compile
from torch._dispatch.python import no_python_dispatcher

from lightning_zeroplus.engine.compile.patches import Patches

_SIZES = (2**12, 2**20)  # elements in the gathers that are timed
_TRIALS = 5


class WallClockEvent:
    """A timing event of a device without streams."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the current time."""
        self.time = time.perf_counter()

    def elapsed_time(self, end: WallClockEvent) -> float:
        """Milliseconds from here to ``end``."""
        return (end.time - self.time) * 1e3

    def synchronize(self) -> None:
        """Do nothing: there is no stream to wait for."""


class _Random:
    """``torch.random`` with a ``fork_rng`` that ignores devices."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.random, name)

    @staticmethod
    def fork_rng(devices: Any = (), **kwargs: Any) -> Any:
        return torch.random.fork_rng(devices=[], **kwargs)


@contextmanager
def cpu_profiling() -> Iterator[None]:
    """Give the profiler of the passes what it needs of an accelerator, and gloo an averaging all-reduce, within.

    The Python dispatcher, under which AOT autograd compiles, is off within: a collective would keep the GIL while it
    waits for gloo's thread, which may be waiting for the GIL to drop a tensor.
    """
    patches = Patches()
    accelerator = get_accelerator()
    patches.replace(type(accelerator), "Event", property(lambda self: WallClockEvent))
    patches.replace(accelerator, "current_device", lambda: "cpu")
    patches.replace(accelerator, "random", _Random)
    patches.replace(dist, "all_reduce", _averaging(dist.all_reduce))
    patches.replace(prefetch, "create_predictor", _gather_time)
    # Upstream collects garbage ten times per graph to empty a GPU's allocator, which takes most of the time on CPU.
    for module in (upstream_backend, zero3_compile):
        patches.replace(module, "gc", SimpleNamespace(collect=lambda: 0))
    try:
        with no_python_dispatcher():
            yield
    finally:
        patches.undo()


@contextmanager
def alone() -> Iterator[None]:
    """Replace the collectives of the passes by local operations within.

    The profiler all-reduces what it has measured. It would wait for ranks that do not compile now, because they have
    compiled the shapes of their batches before.
    """
    patches = Patches()
    patches.replace(dist, "all_reduce", _with_itself)
    patches.replace(dist, "barrier", lambda *args, **kwargs: None)
    try:
        yield
    finally:
        patches.undo()


def _with_itself(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any) -> None:
    """The result of an all-reduce if all ranks have the same tensor."""
    if op == dist.ReduceOp.SUM:
        tensor.mul_(dist.get_world_size(group=group))


def _averaging(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any) -> Any:
        if op != dist.ReduceOp.AVG:
            return all_reduce(tensor, op, group=group, **kwargs)
        result = all_reduce(tensor, dist.ReduceOp.SUM, group=group, **kwargs)
        world = dist.get_world_size(group=group)
        tensor.copy_(tensor / world) if tensor.is_floating_point() else tensor.floor_divide_(world)
        return result

    return reduce


_predicted: dict[int, float] = {}


def _gather_time() -> Callable[[int], float]:
    """Seconds of an all-gather as a function of its bytes: a line through two measurements, the same on all ranks.

    Upstream times gathers of up to 2**30 elements, minutes on gloo, and interpolates with scipy.
    """
    if not _predicted:
        world = dist.get_world_size()
        for size in _SIZES:
            part, whole = torch.zeros(size // world), torch.zeros(size // world * world)
            dist.all_gather_into_tensor(whole, part)
            start = time.perf_counter()
            for _ in range(_TRIALS):
                dist.all_gather_into_tensor(whole, part)
            seconds = torch.tensor((time.perf_counter() - start) / _TRIALS, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            _predicted[whole.nbytes] = float(seconds)
    (small, low), (large, high) = _predicted.items()
    slope = max(high - low, 0.0) / (large - small)
    return lambda nbytes: 0.0 if nbytes == 0 else max(low + slope * (nbytes - small), 1e-6)
