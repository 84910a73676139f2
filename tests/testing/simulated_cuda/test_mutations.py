"""Lines without which training on a GPU would be wrong or slow, and that no test on the CPU misses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zeroplus.testing import RankPool
from lightning_zeroplus.testing.simulated_cuda import record
from tests.support.training import trainer, zero_plus
from tests.testing.simulated_cuda.jobs import Job, run

_OVERLAP = {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 300}}
_IN_LINE = {"zero_optimization": {"overlap_comm": False}}


class Loop(NamedTuple):
    """A manual loop whose backwards run on streams of their own, which nobody joins.

    Attributes:
        stage: The stage of ZeRO.
        window: Reduce once for both backwards.
        reduced_elsewhere: Leave the window on a third stream, and open another one before the step.
        towers: The network has two parts, which run on streams of their own in each forward.
        config: Of DeepSpeed, over the defaults.
        rows: Of a batch. With many, what is freed has place for a bucket.
    """

    stage: int
    window: bool = False
    reduced_elsewhere: bool = False
    towers: bool = False
    config: dict[str, Any] = {}
    rows: int = 4


class _Module(pl.LightningModule):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.loop = loop
        torch.manual_seed(0)
        self.streams: list[torch.cuda.Stream] = []
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        self.streams = self.streams or [torch.cuda.Stream() for _ in range(3)]
        with torch.cuda.stream(self.streams[2]) if self.loop.reduced_elsewhere else contextlib.nullcontext():
            for _ in range(2 if self.loop.reduced_elsewhere else 1):
                self._backwards(batch[0])
        optimizer.step()
        optimizer.zero_grad()

    def _backwards(self, x: Tensor) -> None:
        window = self.trainer.strategy.coalesce() if self.loop.window else contextlib.nullcontext()
        with window:
            for part, stream in zip(x.chunk(2), self.streams, strict=False):
                stream.wait_stream(torch.cuda.default_stream())
                part.record_stream(stream)
                with torch.cuda.stream(stream):
                    self.manual_backward(self.net(part).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(8 * self.loop.rows, 16)), batch_size=self.loop.rows)


class _Towers(_Module):
    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2)))

    def _backwards(self, x: Tensor) -> None:
        streams = [torch.cuda.Stream() for _ in self.net]
        for part, stream in zip(x.chunk(2), self.streams, strict=False):
            losses = []
            for tower, own in zip(self.net, streams, strict=True):
                own.wait_stream(torch.cuda.default_stream())
                part.record_stream(own)
                with torch.cuda.stream(own):
                    losses.append(tower(part).square().mean())
                stream.wait_stream(own)
                losses[-1].record_stream(stream)
            with torch.cuda.stream(stream):
                self.manual_backward(sum(losses))


def races(loop: Loop, mutation: str | None) -> list[str]:
    """The races of three steps, with a line of ours taken out."""
    with MUTATIONS[mutation].taken_out() if mutation else contextlib.nullcontext(), record() as log:
        strategy = zero_plus(loop.stage, loop.config)
        trainer(strategy, max_steps=3, accelerator="cuda").fit((_Towers if loop.towers else _Module)(loop))
    return [str(race) for race in log.races()]


@contextlib.contextmanager
def _no_record_stream() -> Iterator[None]:
    from lightning_zeroplus.engine.reduction.streams import Writers

    wait_for_all = Writers.wait_for_all
    with (
        mock.patch.object(Writers, "use", lambda self, tensor: None),
        mock.patch.object(Writers, "wait_for_all", lambda self, tensors=(): wait_for_all(self)),
    ):
        yield


@contextlib.contextmanager
def _no_event_safety() -> Iterator[None]:
    from lightning_zeroplus.engine.families import zero12

    safe = zero12.make_stream_safe

    def unsafe(optimizer: Any, buffers: int) -> None:
        safe(optimizer, buffers)
        optimizer._offload_gradient_safety_enabled = False

    with mock.patch.object(zero12, "make_stream_safe", unsafe):
        yield


@contextlib.contextmanager
def _no_wait_for_the_partition() -> Iterator[None]:
    from lightning_zeroplus.engine.reduction.streams import PARTITION, Writers

    wait = Writers.wait
    with mock.patch.object(Writers, "wait", lambda self, key: None if key == PARTITION else wait(self, key)):
        yield


@contextlib.contextmanager
def _no_waits_of_streams() -> Iterator[None]:
    """``wait_for_all`` still records the stream that reads."""
    from lightning_zeroplus.engine.reduction.streams import Writers

    def only_use(self: Any, tensors: Any = ()) -> None:
        for tensor in tensors:
            self.use(tensor)

    with mock.patch.object(Writers, "wait_for_all", only_use):
        yield


@contextlib.contextmanager
def _partition_written_unseen() -> Iterator[None]:
    """At stage 3 the reduction stream adds to the partition, and nobody notes it."""
    from lightning_zeroplus.engine.reduction.streams import PARTITION, Writers

    record_write = Writers.record
    with mock.patch.object(Writers, "record", lambda self, key: None if key == PARTITION else record_write(self, key)):
        yield


def _buckets_given_back_at_once() -> Any:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from lightning_zeroplus.engine.reduction.overlapped import StreamSafeReduction

    return mock.patch.object(
        StreamSafeReduction, "_release_ipg_buffers", lambda self: DeepSpeedZeroOptimizer._release_ipg_buffers(self)
    )


def _copies_at_once() -> Any:
    """A bucket is filled on other streams than the one whose order the allocator knows."""
    return mock.patch("lightning_zeroplus.engine.reduction.buckets.WaitsOnDevice")


def _gathers_at_once() -> Any:
    return mock.patch("lightning_zeroplus.engine.gathering.after_writes.streams_matter", lambda: False)


class Mutation(NamedTuple):
    """A line that is taken out.

    Attributes:
        taken_out: A context without it.
        loop: A loop that must notice.
        on_all_ranks: If not, it is up to a rank's autograd on which streams gradients come.
    """

    taken_out: Callable[[], Any]
    loop: Loop
    on_all_ranks: bool = True


MUTATIONS = {
    "no events between the copies into a bucket and its reduction": Mutation(
        _no_event_safety, Loop(2, config=_OVERLAP)
    ),
    "buckets are given back while they are reduced": Mutation(
        _buckets_given_back_at_once, Loop(2, towers=True, config=_OVERLAP)
    ),
    "a bucket is filled before its memory is free": Mutation(
        _copies_at_once, Loop(2, towers=True, config=_OVERLAP, rows=128), on_all_ranks=False
    ),
    "no record_stream": Mutation(_no_record_stream, Loop(2, window=True, reduced_elsewhere=True)),
    "no wait for who wrote the partition": Mutation(_no_wait_for_the_partition, Loop(2, config=_IN_LINE)),
    "the step does not know who wrote the partition": Mutation(_partition_written_unseen, Loop(3, config=_OVERLAP)),
    "weights are gathered while the step writes them": Mutation(_gathers_at_once, Loop(3)),
    "no wait for who wrote the sums": Mutation(_no_waits_of_streams, Loop(3, window=True, reduced_elsewhere=True)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_missing_wait_races(cuda_ranks: RankPool, name: str) -> None:
    _, loop, on_all_ranks = MUTATIONS[name]
    assert cuda_ranks.run(races, loop, None) == [[], []]
    assert (all if on_all_ranks else any)(cuda_ranks.run(races, loop, name))


def _on_the_host(device: torch.device, values: Any, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@contextlib.contextmanager
def _buffers_on_the_host() -> Iterator[None]:
    from lightning_zeroplus.gradients.module_buffers import BufferBroadcast

    begin = BufferBroadcast.__init__
    with mock.patch.object(
        BufferBroadcast, "__init__", lambda self, module, _: begin(self, module, torch.device("cpu"))
    ):
        yield


#: What is left on the CPU, a fit that must notice, and how CUDA says so.
LEFT_ON_THE_CPU: dict[str, tuple[Callable[[], Any], Job, str]] = {
    "comparisons": (
        lambda: mock.patch("lightning_zeroplus.engine.engine.group_of_hosts", lambda _: None),
        Job(2),
        "No backend type associated with device type cpu",
    ),
    "which parameters have a gradient": (
        lambda: mock.patch("lightning_zeroplus.engine.families.replicated.sent_to", _on_the_host),
        Job(0),
        "on the same device",
    ),
    "buffers": (_buffers_on_the_host, Job(2, batch_norm=True), "No backend type associated with device type cpu"),
}


def error_of(name: str) -> str:
    """What a fit raises that leaves something on the CPU."""
    left, job, _ = LEFT_ON_THE_CPU[name]
    with left():
        try:
            run(job, "cuda")
        except RuntimeError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("name", LEFT_ON_THE_CPU)
def test_what_is_left_on_the_cpu_is_refused(cuda_ranks: RankPool, name: str) -> None:
    assert all(LEFT_ON_THE_CPU[name][2] in said for said in cuda_ranks.run(error_of, name))
