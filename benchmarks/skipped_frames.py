"""What parameters of skipped frames cost under compiled ZeRO-3: DeepSpeed's way and ours.

Two CPU ranks train N linear layers in a frame that Dynamo skips (a graph break within a loop), and a layer that is
compiled. DeepSpeed's engine, ported to CPU by ``stock_deepcompile.py``, keeps every parameter that Python reads until
backward ends; ours gathers on access and releases after use. They take turns, round after round, in the same processes,
each compiled anew in every round. Reported are the gathered bytes at the peak of a forward and of a backward, and at
the end of both, in a step after the first; and the median step, with the median of its ratios round by round.

The steps of the two do not do the same work: DeepSpeed's reduces no gradient of the skipped frame, whose parameters
never train. Ours reduces them, and gathers once more for backward. DeepSpeed's ZeRO-3 without a compiler, which does
both, is timed beside them.

    python benchmarks/skipped_frames.py --layers 6 --layers 24
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lightning_zeroplus.engine.compile.meter import GatherMeter

GOALS = {6: 0.3, 24: 0.1}  # of DeepSpeed's peak, by layers
BATCH_SIZE = 32
WAYS = ("DeepSpeed", "ours", "DeepSpeed, not compiled")


class Memory(NamedTuple):
    """Gathered bytes in a step after the first, in which graphs are compiled."""

    forward_peak: int
    forward_end: int
    backward_peak: int
    backward_end: int


class Row(NamedTuple):
    """One way at one number of layers: bytes, and medians over the rounds; ratios are to DeepSpeed's way."""

    layers: int
    width: int
    way: str
    forward_peak: int | None  # None: not measured
    forward_end: int | None
    backward_peak: int | None
    backward_end: int | None
    peak_ratio: float | None
    milliseconds: float
    time_ratio: float
    #: Whether the parameters of the skipped frame have moved.
    trains: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, action="append", help="in the skipped frame; repeatable (default: 6, 24)")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20, help="timed, per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("--picture", type=Path, default=Path("docs", "skipped-frames.png"))
    parser.add_argument("--ranks-write", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.layers = arguments.layers or [6, 24]
    if arguments.ranks_write is not None:
        measure(arguments)
        return
    rows = launch()
    show(rows)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))
    plot(rows, arguments.picture)
    print(arguments.picture)
    missed = [row for row in rows if row.way == "ours" and (row.peak_ratio or 0.0) > GOALS.get(row.layers, 1.0)]
    if missed:
        raise SystemExit(f"The goal of {GOALS} is missed: {missed}")


def launch() -> list[Row]:
    """Run this script on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
        command = [*ranks, sys.executable, *sys.argv, "--ranks-write", str(out)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return [Row(**row) for row in json.loads(out.read_text())]


def measure(arguments: argparse.Namespace) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    rows: list[Row] = []
    for layers in arguments.layers:
        memory: dict[str, Memory | None] = {}
        trains: dict[str, bool] = {}
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(arguments.rounds):
            for way in WAYS:
                memory[way], steps, trains[way] = train(way, layers, arguments.width, arguments.steps)
                seconds[way].append(statistics.median(steps))
            if torch.distributed.get_rank() == 0:
                print(f"{layers} layers, round {number + 1} of {arguments.rounds}: done", flush=True)
        for way in WAYS:
            peak, stock_peak = _peak(memory[way]), _peak(memory[WAYS[0]])
            known = memory[way]
            ratios = [a / b for a, b in zip(seconds[way], seconds[WAYS[0]], strict=True)]
            rows.append(
                Row(
                    layers=layers,
                    width=arguments.width,
                    way=way,
                    forward_peak=known and known.forward_peak,
                    forward_end=known and known.forward_end,
                    backward_peak=known and known.backward_peak,
                    backward_end=known and known.backward_end,
                    peak_ratio=peak / stock_peak if peak and stock_peak else None,
                    milliseconds=1e3 * statistics.median(seconds[way]),
                    time_ratio=statistics.median(ratios),
                    trains=trains[way],
                )
            )
    if torch.distributed.get_rank() == 0:
        arguments.ranks_write.write_text(json.dumps([row._asdict() for row in rows]))
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter


def _peak(memory: Memory | None) -> int | None:
    return None if memory is None else max(memory.forward_peak, memory.backward_peak)


def model(layers: int, width: int) -> nn.Module:
    import torch
    from torch import nn

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)).square().mean()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.skipped = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
            self.compiled = Compiled()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.skipped:
                x = x + torch.tanh(layer(x))
                torch._dynamo.graph_break()
            return self.compiled(x)

    torch.manual_seed(0)
    return Net()


def config() -> dict[str, Any]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": False}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }


def train(way: str, layers: int, width: int, steps: int) -> tuple[Memory | None, list[float], bool]:
    """Some steps: gathered bytes, the seconds of each, and whether the parameters of the skipped frame have moved."""
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    net = model(layers, width)
    skipped = [param for name, param in net.named_parameters() if name.startswith("skipped.")]
    before = [param.detach().clone() for param in skipped]
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = [torch.randn(BATCH_SIZE, width, generator=generator) for _ in range(2 + steps)]
    seconds = []
    with ENGINES[way](net) as (engine, meter):
        observe(engine, meter, inputs[0])  # compiles
        memory = observe(engine, meter, inputs[1])
        for batch in inputs[2:]:
            dist.barrier()
            began = time.perf_counter()
            engine.optimizer.zero_grad()
            engine.backward(engine(batch))
            engine.step()
            dist.barrier()
            seconds.append(time.perf_counter() - began)
        with GatheredParameters(skipped):
            moved = [not torch.equal(param.detach(), old) for param, old in zip(skipped, before, strict=True)]
    assert len(set(moved)) == 1, moved
    return memory, seconds, moved[0]


@contextmanager
def deepspeeds(net: nn.Module) -> Iterator[tuple[Any, GatherMeter]]:
    import torch
    from stock_deepcompile import stock_engine

    with stock_engine(net, torch.optim.SGD(net.parameters(), 1e-2), config()) as engine:
        yield engine, engine.meter


@contextmanager
def ours(net: nn.Module) -> Iterator[tuple[Any, GatherMeter]]:
    import torch

    from lightning_zeroplus.engine.build import build_engine

    engine = build_engine(net, torch.optim.SGD(net.parameters(), 1e-2), config())
    engine.compile(backend="eager", schedule=[(0, ["zero3_compile"])])
    assert engine.compilation is not None
    try:
        yield engine, engine.compilation.meter
    finally:
        engine.destroy()


@contextmanager
def not_compiled(net: nn.Module) -> Iterator[tuple[Any, None]]:
    import deepspeed
    import torch

    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), 1e-2), config=config())
    try:
        yield engine, None
    finally:
        engine.destroy()


ENGINES: dict[str, Callable[[nn.Module], AbstractContextManager[tuple[Any, GatherMeter | None]]]]
ENGINES = dict(zip(WAYS, (deepspeeds, ours, not_compiled), strict=True))


def observe(engine: Any, meter: GatherMeter | None, inputs: Tensor) -> Memory | None:
    """One step, with the meter, if there is one, read between forward and backward."""
    engine.optimizer.zero_grad()
    if meter is None:
        engine.backward(engine(inputs))
        engine.step()
        return None
    meter.reset_peak()
    loss = engine(inputs)
    forward_peak, forward_end = meter.peak, settled(meter)
    meter.reset_peak()
    engine.backward(loss)
    backward_peak, backward_end = meter.peak, settled(meter)
    engine.step()
    return Memory(forward_peak, forward_end, backward_peak, backward_end)


def settled(meter: GatherMeter) -> int:
    """Gathered bytes, once gloo's thread has let go of the last gather's buffer, which takes it a moment."""
    deadline = time.monotonic() + 0.3
    while meter.live() and time.monotonic() < deadline:
        time.sleep(0.001)
    return meter.live()


def show(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Compiled ZeRO-3 with a skipped frame, on two CPU ranks: gathered KiB, medians of the step")
    for column in ("layers", "way", "forward peak", "forward end", "backward peak", "backward end", "peak ratio"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for column in ("ms/step", "time ratio", "trains"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.layers),
            row.way,
            *(
                "" if nbytes is None else f"{nbytes / 1024:.0f}"
                for nbytes in (row.forward_peak, row.forward_end, row.backward_peak, row.backward_end)
            ),
            "" if row.peak_ratio is None else f"{row.peak_ratio:.3f}",
            f"{row.milliseconds:.1f}",
            f"{row.time_ratio:.2f}",
            "yes" if row.trains else "no",
            end_section=row.way == WAYS[-1],
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def plot(rows: list[Row], path: Path) -> None:
    """Gathered bytes of both ways, a panel per number of layers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers = sorted({row.layers for row in rows})
    figure, axes = plt.subplots(1, len(layers), figsize=(4.2 * len(layers), 3.2), squeeze=False, layout="constrained")
    fields = ("forward_peak", "forward_end", "backward_peak")
    for axis, count in zip(axes[0], layers, strict=True):
        for at, way in enumerate(WAYS[:2]):
            (row,) = (row for row in rows if (row.layers, row.way) == (count, way))
            mib = [getattr(row, field) / 2**20 for field in fields]
            places = [place + 0.4 * at - 0.2 for place in range(len(fields))]
            axis.bar_label(axis.bar(places, mib, width=0.38, label=way), fmt="%.2f", fontsize=8)
        axis.set_title(f"{count} layers in a skipped frame, {count + 1} in all", fontsize=10)
        axis.set_xticks(range(len(fields)), [field.replace("_", " ") for field in fields])
        axis.set_ylabel("gathered parameters, MiB")
        axis.margins(y=0.12)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
