"""What one reduction for many backwards saves: reduce-each, DeepSpeed's own window, ours, and DDP with ``no_sync``.

Two CPU ranks train the same multi-layer perceptron with N backwards per step. The ways to reduce take turns, round
after round, in the same processes; a step is measured between two barriers. Reported are, per way, the median step,
the median of its ratios to DeepSpeed's own window in the same round, the gradient reductions of a step and their
payload, the bytes of unreduced gradients at the end of the last backward, and how far the resident set grew in a step
(from Linux: activations, buckets and gradients together).

``--wire 1gbit`` moves the ranks into a network namespace of their own whose loopback device is limited to that rate
with ``tc``, as root only: on one machine the wire is otherwise as fast as its memory, which no network is.

    python benchmarks/coalesce.py --mib 32 --mib 256 --stage 1 --stage 2 --stage 3
    python benchmarks/coalesce.py --mib 32 --stage 2 --wire 1gbit
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.nodes.hosts import Hosts

LAYERS = 32
BATCH_SIZE = 8


class Row(NamedTuple):
    """One way at one setting: medians over the rounds."""

    mib: float
    stage: int
    backwards: int
    way: str
    seconds: float
    #: Median of the ratios to DeepSpeed's own window, round by round.
    to_native: float
    #: The same to a reduction in every backward.
    to_each: float
    collectives: int
    reduced_mib: float
    held_mib: float
    grown_mib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mib", type=int, action="append", help="MiB of fp32 gradients; repeatable (default: 32, 256)")
    parser.add_argument("--stage", type=int, action="append", help="repeatable (default: 1, 2, 3)")
    parser.add_argument("--backwards", type=int, action="append", help="per step; repeatable (default: 1, 2, 4, 8)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wire", help="a rate for tc, such as 1gbit")
    parser.add_argument("--output", type=Path, default=Path("outputs", "coalesce"))
    parser.add_argument("--ranks-write", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.mib = arguments.mib or [32, 256]
    arguments.stage = arguments.stage or [1, 2, 3]
    arguments.backwards = arguments.backwards or [1, 2, 4, 8]
    if arguments.ranks_write is not None:
        measure(arguments)
        return
    rows = launch(arguments)
    arguments.output.mkdir(parents=True, exist_ok=True)
    name = "coalesce" if arguments.wire is None else f"coalesce-{arguments.wire}"
    (arguments.output / f"{name}.json").write_text(json.dumps([row._asdict() for row in rows], indent=1))
    show(rows, arguments.wire)
    plot(rows, arguments.wire, arguments.output / f"{name}.png")
    print(f"{arguments.output / name}.json and .png")


def launch(arguments: argparse.Namespace) -> list[Row]:
    """Run this script on two ranks, in a slow network if asked for."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        out = Path(folder, "rows.json")
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
        command = [*ranks, sys.executable, *sys.argv, "--ranks-write", str(out)]
        if arguments.wire is not None:
            if not re.fullmatch(r"\d+[kmg]bit", arguments.wire):
                raise SystemExit(f"--wire {arguments.wire}: give a rate such as 500mbit or 1gbit.")
            host = stack.enter_context(Hosts(1, rate=arguments.wire))
            command = host.command(0, *command)
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return [Row(**row) for row in json.loads(out.read_text())]


def measure(arguments: argparse.Namespace) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    logging.disable(logging.WARNING)
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    rows = []
    for mib in arguments.mib:
        for stage in arguments.stage:
            ways = Ways(mib, stage)
            for backwards in arguments.backwards:
                rows += compare(ways, mib, backwards, arguments.rounds)
                if torch.distributed.get_rank() == 0:
                    print(f"{mib} MiB, stage {stage}, {backwards} backwards: done", flush=True)
    if torch.distributed.get_rank() == 0:
        arguments.ranks_write.write_text(json.dumps([row._asdict() for row in rows]))
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter


class Counts(NamedTuple):
    """What one step did."""

    collectives: int
    reduced: int
    held: int


class Ways:
    """The ways to reduce, at one size and stage: each a function that makes a step of so many backwards."""

    def __init__(self, mib: int, stage: int) -> None:
        import deepspeed
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        from lightning_zeroplus.engine.build import build_engine
        from lightning_zeroplus.strategy.common.window import GradientWindow

        self.stage = stage
        width = math.isqrt(mib * 2**20 // 4 // LAYERS)

        def model() -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.ReLU())])

        def sgd(module: nn.Module) -> Any:
            return torch.optim.SGD(module.parameters(), 1e-3)

        self.inputs = torch.randn(BATCH_SIZE, width, generator=torch.Generator().manual_seed(1))
        self.budget = mib * 2**19
        modules = [model() for _ in range(4)]
        zero = {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0}
        elements = sum(param.numel() for param in modules[0].parameters())
        zero["reduce_bucket_size"] = min(elements, 2**24)  # the default of ZeroPlusStrategy, for all
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
        }

        def upstream(module: nn.Module) -> Any:
            return deepspeed.initialize(model=module, optimizer=sgd(module), config=dict(config))[0]

        self.ours = build_engine(modules[0], sgd(modules[0]), dict(config), reduction="backward")
        self.window: Any = GradientWindow(lambda: self.ours)
        self.ours.gradient_accumulation.guard = self.window  # type: ignore[union-attr]
        self.native = upstream(modules[1])
        self.ddp = DistributedDataParallel(modules[2])
        self.ddp_optimizer = sgd(self.ddp)
        self.ddp_traffic = [0, 0]
        # A lambda, because DDP compares annotations with classes, and here they are strings.
        self.ddp.register_comm_hook(self.ddp_traffic, lambda traffic, bucket: _count_and_reduce(traffic, bucket))
        self.steps: dict[str, Callable[[int], Counts]] = {
            "reduce each": lambda n: self._ours(n, contextlib.nullcontext()),
            "DeepSpeed's window": self._native,
            "coalesce()": lambda n: self._ours(n, self.window.coalesce(None, None)),
            "coalesce(backwards=N)": lambda n: self._ours(n, self.window.coalesce(n, None)),
            "coalesce(max_bytes=half)": lambda n: self._ours(n, self.window.coalesce(None, self.budget)),
            "DDP no_sync": self._ddp,
        }

    def _backwards(self, engine: Any, count: int) -> None:
        for _ in range(count):
            engine.backward(engine(self.inputs).square().mean() / count)

    def _ours(self, backwards: int, window: Any) -> Counts:
        from lightning_zeroplus.callbacks.traffic import ReductionTraffic

        accumulation = self.ours.gradient_accumulation
        assert accumulation is not None
        with ReductionTraffic(self.ours, int) as traffic:
            with window:
                self._backwards(self.ours, backwards)
                held = accumulation.held_bytes()
            self.ours.step()
        accumulation.zero_grad()
        return Counts(traffic._collectives, traffic._bytes, held)

    def _native(self, backwards: int) -> Counts:
        from lightning_zeroplus.callbacks.traffic import ReductionTraffic

        stand_in = SimpleNamespace(
            updating=False,
            gradient_accumulation=SimpleNamespace(held_bytes=int),
            _config=self.native._config,
        )
        held = 0
        with ReductionTraffic(stand_in, int) as traffic:
            with self.native.coalesce_grad_reduction():
                self._backwards(self.native, backwards)
                held = sum(p.grad.nbytes for p in self.native.module.parameters() if p.grad is not None)
            stand_in.updating = True
            self.native.step()
        return Counts(traffic._collectives, traffic._bytes, held)

    def _ddp(self, backwards: int) -> Counts:
        self.ddp_traffic[:] = [0, 0]
        for number in range(backwards):
            last = number == backwards - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                (self.ddp(self.inputs).square().mean() / backwards).backward()
        held = sum(p.grad.nbytes for p in self.ddp.parameters() if p.grad is not None)
        self.ddp_optimizer.step()
        self.ddp_optimizer.zero_grad()
        return Counts(self.ddp_traffic[0], self.ddp_traffic[1], held)


def _count_and_reduce(traffic: list[int], bucket: Any) -> Any:
    """A hook of DDP: count the bucket, then reduce it as DDP would."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    traffic[0] += 1
    traffic[1] += bucket.buffer().nbytes
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]


def compare(ways: Ways, mib: int, backwards: int, rounds: int) -> list[Row]:
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {way: [] for way in ways.steps}
    grown: dict[str, list[float]] = {way: [] for way in ways.steps}
    counts: dict[str, Counts] = {}
    for number in range(rounds + 1):
        for way, step in ways.steps.items():
            before = _resident(reset_peak=True)
            dist.barrier()
            start = time.perf_counter()
            counts[way] = step(backwards)
            dist.barrier()
            if number:  # the first round warms up
                seconds[way].append(time.perf_counter() - start)
                grown[way].append(_resident(peak=True) - before)

    def ratio(way: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[way], seconds[to], strict=True))

    return [
        Row(
            mib,
            ways.stage,
            backwards,
            way,
            statistics.median(seconds[way]),
            ratio(way, "DeepSpeed's window"),
            ratio(way, "reduce each"),
            counts[way].collectives,
            counts[way].reduced / 2**20,
            counts[way].held / 2**20,
            statistics.median(grown[way]),
        )
        for way in ways.steps
    ]


def _resident(peak: bool = False, reset_peak: bool = False) -> float:
    """MiB of this process in memory, now or at the most since the peak was reset."""
    if reset_peak:
        Path("/proc/self/clear_refs").write_text("5")
    key = "VmHWM" if peak else "VmRSS"
    return int(re.findall(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024


def show(rows: list[Row], wire: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    speed = "loopback" if wire is None else f"a wire of {wire}/s"
    table = Table(title=f"Steps of N backwards on two CPU ranks over {speed}: medians")
    for column in ("MiB", "stage", "N", "way", "s/step", "÷ DeepSpeed's", "÷ each", "reductions", "MiB reduced"):
        table.add_column(column, justify="left" if column == "way" else "right")
    table.add_column("MiB held", justify="right")
    table.add_column("MiB grown", justify="right")
    for row in rows:
        table.add_row(
            f"{row.mib:.0f}",
            str(row.stage),
            str(row.backwards),
            row.way,
            f"{row.seconds:.3f}",
            f"{row.to_native:.2f}",
            f"{row.to_each:.2f}",
            str(row.collectives),
            f"{row.reduced_mib:.0f}",
            f"{row.held_mib:.0f}",
            f"{row.grown_mib:.0f}",
            end_section=row.way == rows[-1].way,
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def plot(rows: list[Row], wire: str | None, path: Path) -> None:
    """Seconds per step over N, a panel per size and stage."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes, stages = sorted({row.mib for row in rows}), sorted({row.stage for row in rows})
    ways = list(dict.fromkeys(row.way for row in rows))
    figure, axes = plt.subplots(
        len(sizes), len(stages), figsize=(3.6 * len(stages), 2.9 * len(sizes)), squeeze=False, layout="constrained"
    )
    for line, size in enumerate(sizes):
        for column, stage in enumerate(stages):
            axis = axes[line][column]
            for way in ways:
                cells = [row for row in rows if (row.mib, row.stage, row.way) == (size, stage, way)]
                axis.plot([row.backwards for row in cells], [row.seconds for row in cells], marker="o", label=way)
            axis.set_title(f"ZeRO {stage}, {size:.0f} MiB of gradients", fontsize=10)
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted({row.backwards for row in rows}), sorted({row.backwards for row in rows}))
            axis.set_ylim(bottom=0)
            axis.set_xlabel("backwards per step")
            axis.set_ylabel("seconds per step")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    if wire is not None:
        figure.suptitle(f"Over a wire of {wire}/s")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
