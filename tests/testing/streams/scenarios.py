"""Small trainings whose forwards run, correctly joined, on several streams; and what a sanitizer finds in them.

A scenario takes the function that builds its engine, so that the same ones run on DeepSpeed's and on ours.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import deepspeed
import torch
from torch import Tensor, nn

from lightning_zeroplus.testing.streams import Race, Stream, StreamSanitizer

WIDTH = 16
BUCKET = 700  # elements: two layers and a bit
OVERSIZED = 4 * WIDTH  # outputs of a layer that has more elements than a bucket

EngineFactory = Callable[[nn.Module, torch.optim.Optimizer, dict[str, Any]], Any]


class Scenario(NamedTuple):
    """
    model: ``"chain"``, ``"towers"`` or ``"fan_in"``.
    streams: How many streams the layers alternate between; 1 is the default stream alone.
    assigned: The stream of each layer, if they do not alternate.
    bucket: Elements in a bucket.
    layers: How many layers.
    oversized: The layers with more elements than a bucket.
    dtype: The parameters' dtype: ``"fp32"``, ``"bf16"``, or ``"bf16_fp32"``, which accumulates in fp32.
    zero: Options of ``zero_optimization``.
    backwards: Backwards per step; each runs on a stream of its own, which nobody joins, if ``unjoined``.
    window: Whether gradients are held from the first to the last of them (ours only).
    own_streams: Whether the nodes that accumulate gradients are made before the engine is, on the layers' streams, so
        that a rank's own partition is produced on several streams too, and one rank is enough for a race.
    slow: Layers whose gradients come late, on a device where that takes time.
    slow_reduction: Whether the reduction stream is busy when a backward begins, on a device where that takes time.
    """

    model: str = "chain"
    streams: int = 2
    layers: int = 16
    assigned: tuple[int, ...] = ()
    bucket: int = BUCKET
    oversized: tuple[int, ...] = ()
    dtype: str = "fp32"
    zero: dict[str, Any] = {}
    backwards: int = 1
    unjoined: bool = False
    window: bool = False
    own_streams: bool = False
    slow: tuple[int, ...] = ()
    slow_reduction: bool = False


def label(scenario: Scenario) -> str:
    """What is not the default, in words."""
    changed = {name: value for name, value in scenario._asdict().items() if value != Scenario._field_defaults[name]}
    zero = {"stage": 2, "overlap_comm": True} | changed.pop("zero", {})
    return " ".join(
        [scenario.model, *(f"{name}={value}" for name, value in (zero | changed).items() if name != "model")]
    )


class Place(Protocol):
    """Where a scenario runs: a sanitizer's simulated streams, or a GPU's."""

    def current(self) -> Any: ...

    def on(self, stream: Any) -> AbstractContextManager[Any]: ...

    def stream(self, name: str) -> Any: ...

    def late(self, x: Tensor) -> Tensor:
        """``x``, whose gradient is long in coming."""
        ...


class Simulated:
    def __init__(self, sanitizer: StreamSanitizer) -> None:
        self.sanitizer = sanitizer
        self.on, self.stream = sanitizer.on, sanitizer.stream

    def current(self) -> Stream:
        return self.sanitizer.device.current

    def late(self, x: Tensor) -> Tensor:
        return x


class Found(NamedTuple):
    races: list[Race]
    sites: dict[str, int]
    kernels: int


class Net(nn.Module):
    """Layers that alternate between streams; each waits for the stream of its input."""

    def __init__(self, place: Place, scenario: Scenario) -> None:
        super().__init__()
        self.place, self.scenario = place, scenario
        self.streams = [place.current(), *(place.stream(f"side {index}") for index in range(1, scenario.streams))]
        widths = (OVERSIZED if index in scenario.oversized else WIDTH for index in range(scenario.layers))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, width, bias=False) for width in widths)
        self.accumulators = [self.accumulator(index) for index in range(scenario.layers) if scenario.own_streams]

    def layer(self, index: int, x: Tensor) -> Tensor:
        y = self.layers[index](x)[..., :WIDTH]
        return self.place.late(y) if index in self.scenario.slow else y

    def assigned(self, index: int) -> int:
        return self.scenario.assigned[index] if self.scenario.assigned else index % len(self.streams)

    def stream(self, index: int) -> Any:
        return self.streams[self.assigned(index)]

    def accumulator(self, index: int) -> Any:
        weight = self.layers[index].weight
        with self.place.on(self.stream(index)):
            return weight.expand_as(weight).grad_fn.next_functions[0][0]

    def forward(self, x: Tensor) -> Tensor:
        caller = previous = self.place.current()
        for index in range(len(self.layers)):
            stream = self.stream(index) if len(self.streams) > 1 else caller
            stream.wait_stream(previous)
            x.record_stream(stream)
            with self.place.on(stream):
                x = self.layer(index, x)
            previous = stream
        caller.wait_stream(previous)
        x.record_stream(caller)
        return x.float().pow(2).mean()


class Towers(Net):
    """One tower per stream; the layers of the towers are computed in turn, and so are their backwards."""

    def forward(self, x: Tensor) -> Tensor:
        caller = self.place.current()
        for stream in self.streams:
            stream.wait_stream(caller)
            x.record_stream(stream)
        ends = [x] * len(self.streams)
        for index in range(len(self.layers)):
            tower = self.assigned(index)
            with self.place.on(self.streams[tower]):
                ends[tower] = self.layer(index, ends[tower])
        outputs = []
        for stream, end in zip(self.streams, ends, strict=True):
            with self.place.on(stream):
                outputs.append(end.float().pow(2).mean())
        for stream, output in zip(self.streams, outputs, strict=True):
            caller.wait_stream(stream)
            output.record_stream(caller)
        return torch.stack(outputs).sum()


class FanIn(Net):
    """A chain, each of whose layers adds two branches of one input, on different streams."""

    def forward(self, x: Tensor) -> Tensor:
        caller = self.place.current()
        for first in range(0, len(self.layers), 2):
            branches = []
            for index in (first, first + 1):
                stream = self.stream(index)
                stream.wait_stream(caller)
                x.record_stream(stream)
                with self.place.on(stream):
                    branches.append(self.layer(index, x))
                caller.wait_stream(stream)
                branches[-1].record_stream(caller)
            x = branches[0] + branches[1]
        return x.float().pow(2).mean()


MODELS = {"chain": Net, "towers": Towers, "fan_in": FanIn}


def stock(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    """DeepSpeed's own engine."""
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def ours(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    from lightning_zeroplus.engine.build import build_engine

    return build_engine(model, optimizer, config)


def run(
    scenario: Scenario, factory: EngineFactory, *, steps: int = 2, lifetime: bool = False, drop: str | None = None
) -> Found:
    """Train ``steps`` steps on this rank and return what the sanitizer found."""
    torch.manual_seed(0)
    with StreamSanitizer(lifetime=lifetime, drop=drop) as sanitizer:
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed("gloo", verbose=False)
        model = MODELS[scenario.model](Simulated(sanitizer), scenario)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = factory(model, optimizer, config(scenario))
        try:
            _train(engine, sanitizer, scenario, steps)
        finally:
            engine.destroy()
    return Found(sanitizer.races, sanitizer.sites, len(sanitizer.device.kernels))


def _train(engine: Any, sanitizer: StreamSanitizer, scenario: Scenario, steps: int) -> None:
    for name in ("reduction_stream", "reduce_and_partition_stream"):
        stream = getattr(engine.optimizer, name, None)
        if stream is not None and stream is not sanitizer.device.default:
            stream.name = "reduction"
    users = [sanitizer.stream(f"user {index}") for index in range(scenario.backwards)]
    sanitizer.clear()  # what building the engine launched
    dtype = torch.float32 if scenario.dtype == "fp32" else torch.bfloat16
    for _ in range(steps):
        if scenario.window:
            engine.open_window(None)
        for user in users:
            if scenario.unjoined:
                user.wait_stream(sanitizer.device.default)
            with sanitizer.on(user) if scenario.unjoined else nullcontext():
                engine.backward(engine(torch.randn(4, WIDTH, dtype=dtype)))
        if scenario.window:
            engine.close_window(True)
        engine.step()
        engine.optimizer.zero_grad()


def config(scenario: Scenario) -> dict[str, Any]:
    options: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": {"reduce_bucket_size": scenario.bucket, "allgather_bucket_size": 10**6, **scenario.zero},
    }
    if scenario.dtype != "fp32":
        options["bf16"] = {"enabled": True}
    if scenario.dtype == "bf16_fp32":
        options["data_types"] = {"grad_accum_dtype": "fp32"}
    return options
