"""A compiled engine and its reference: one process, no ZeRO, no compiler, all ranks' batches."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import deepspeed
import torch
from torch import Tensor, nn
from torch import distributed as dist

from lightning_zeroplus.engine.build import build_engine
from lightning_zeroplus.engine.engine import ZeroPlusEngine
from tests.engine.compile.models import batch

LR = 0.1


class Outcome(NamedTuple):
    """
    error: The largest difference of a parameter from the reference's.
    still: Trainable parameters that have not moved.
    forward_peak: The most gathered bytes in a forward after the first step.
    forward_end: Gathered bytes at the end of a forward.
    backward_peak: The most gathered bytes in a backward after the first step.
    backward_end: Gathered bytes at the end of a backward.
    compilations: Graphs that were compiled in each step.
    eager: The modules that read parameters in Python.
    """

    error: float
    still: list[str]
    forward_peak: int
    forward_end: int
    backward_peak: int
    backward_end: int
    compilations: list[int]
    eager: list[str]


def config(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 2000,
            "stage3_param_persistence_threshold": 0,
            "overlap_comm": False,
            **zero,
        },
    }


#: Differentiates a loss on this rank; ``step`` says which batch.
Loop = Callable[[Callable[..., Tensor], Callable[..., None], int], None]


def one_backward(loss: Callable[..., Tensor], backward: Callable[..., None], step: int) -> None:
    backward(loss(step))


@contextmanager
def compiled_engine(
    model: nn.Module, stage: int, *, backend: str = "eager", schedule: Any = None, **options: Any
) -> Iterator[ZeroPlusEngine]:
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    zero = options.pop("zero", {})
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=LR)
    engine = build_engine(model, optimizer, config(stage, **zero), **options)
    with brief_profiles():
        engine.compile(backend=backend, schedule=schedule)
        try:
            yield engine
        finally:
            engine.destroy()


@contextmanager
def brief_profiles() -> Iterator[None]:
    """Let upstream's profiler run every operation once; it runs each 15 times, between barriers."""
    from deepspeed.compile.profilers.graph_profile import ProfilingInterpreter

    initialize = ProfilingInterpreter.__init__

    def brief(self: Any, graph: Any, iteration: int = 10, warmup: int = 5, **kwargs: Any) -> None:
        initialize(self, graph, iteration=1, warmup=0, **kwargs)

    with patch.object(ProfilingInterpreter, "__init__", brief):
        yield


def train(
    make: Callable[[], nn.Module],
    stage: int,
    loop: Loop = one_backward,
    steps: int = 2,
    rows: tuple[int, ...] = (6,),
    **options: Any,
) -> Outcome:
    """Train on this rank, and the reference beside it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make()
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD([param for param in reference.parameters() if param.requires_grad], lr=LR)
    peaks, compilations = [0, 0, 0, 0], []
    with compiled_engine(model, stage, **options) as engine:
        assert engine.compilation is not None
        meter = engine.compilation.meter
        for step in range(steps):
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            watch = _Watch(engine, meter)
            size = rows[step % len(rows)]
            engine.optimizer.zero_grad()
            loop(lambda n, size=size, watch=watch: watch.forward(*batch(n, rank, size)), watch.backward, step)
            engine.step()
            optimizer.zero_grad()
            for other in range(world):
                loop(
                    lambda n, other=other, size=size: reference(*batch(n, other, size)) / world,
                    lambda loss, **kwargs: loss.backward(**kwargs),
                    step,
                )
            optimizer.step()
            compilations.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
            if step:
                peaks = [max(pair) for pair in zip(peaks, watch.peaks, strict=True)]
        trained = {name: full(param) for name, param in model.named_parameters()}
        eager = engine.compilation.eager
        modules = sorted(eager.modules) if eager is not None else []
    wanted = dict(reference.named_parameters())
    return Outcome(
        error=max(float((trained[name] - wanted[name]).abs().max()) for name in wanted),
        still=[
            name
            for name, param in model.named_parameters()
            if param.requires_grad and torch.equal(trained[name], start[name])
        ],
        forward_peak=peaks[0],
        forward_end=peaks[1],
        backward_peak=peaks[2],
        backward_end=peaks[3],
        compilations=compilations,
        eager=modules,
    )


class _Watch:
    """Forwards and backwards, and what is gathered during and after them."""

    def __init__(self, engine: ZeroPlusEngine, meter: Any) -> None:
        self.engine, self.meter = engine, meter
        self.peaks = [0, 0, 0, 0]

    def _note(self, at: int) -> None:
        self.peaks[at] = max(self.peaks[at], self.meter.peak)
        # Gloo's thread holds on to the buffer of the last gather for a moment after the gather is done.
        deadline = time.monotonic() + 0.5
        while self.meter.live() and time.monotonic() < deadline:
            time.sleep(0)
        self.peaks[at + 1] = max(self.peaks[at + 1], self.meter.live())

    def forward(self, *inputs: Tensor) -> Tensor:
        self.meter.reset_peak()
        loss = self.engine(*inputs)
        self._note(0)
        return loss

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.meter.reset_peak()
        self.engine.backward(loss, **kwargs)
        self._note(2)


def full(param: nn.Parameter) -> Tensor:
    """All of a parameter, gathered if it is partitioned."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    if not hasattr(param, "ds_id"):
        return param.detach().clone()
    with GatheredParameters([param]):
        return param.detach().clone()
