"""How much of a backward's communication overlaps with its compute: DeepSpeed's barrier against 2 to 8 bucket buffers.

A simulation, on two CPU ranks: the real engines run one ZeRO-2 backward under ``StreamSanitizer``, which records every
kernel and what it waits for; then each kernel is started as soon as that is finished. A layer's backward takes 1, its
reduction ``ratio`` times that, times a random factor of mean 1 (exponential, the same for all variants). Reported are
makespans relative to the best that any number of buffers can give, which is a run with one for each bucket.

    python benchmarks/overlap_simulation.py --layers 20 --layers 40 --layers 60
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

WIDTH = 16
RATIOS = (0.3, 0.6, 1.0, 1.4, 2.0)
BUFFERS = (2, 3, 4, 8)
LAYERS_PER_BUCKET = 2


class Variant(NamedTuple):
    """``buffers`` None: DeepSpeed's own engine."""

    name: str
    buffers: int | None


def simulate(layers: int, variant: Variant, seeds: int, gantt: str | None) -> tuple[dict[str, list[float]], int]:
    """Makespans of one backward by ratio, one per seed, and the number of races, on this rank."""
    import logging

    os.environ["DS_ACCELERATOR"] = "cpu"
    logging.disable(logging.WARNING)
    import deepspeed
    import torch
    from torch import nn

    from lightning_zeroplus.engine.build import build_engine
    from lightning_zeroplus.testing import StreamSanitizer

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    zero = {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": LAYERS_PER_BUCKET * WIDTH**2,
        "allgather_bucket_size": 10**6,
    }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    with StreamSanitizer() as sanitizer:
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        if variant.buffers is None:
            engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        else:
            engine = build_engine(model, optimizer, config, bucket_buffers=variant.buffers)
        loss = engine(torch.randn(4, WIDTH)).square().mean()
        sanitizer.clear()
        engine.backward(loss)
        races = len(sanitizer.races)
        makespans = {
            str(ratio): [sanitizer.timeline(_durations(ratio, seed)) for seed in range(seeds)] for ratio in RATIOS
        }
        if gantt is not None and torch.distributed.get_rank() == 0:
            sanitizer.timeline(_durations(2.0, 0), picture=gantt)
        engine.destroy()
    return makespans, races


def _durations(ratio: float, seed: int) -> Any:
    jitter = random.Random(seed)

    def duration(kernel: Any) -> float:
        operator = kernel.name.split()[0]
        if operator.startswith("c10d::"):
            layers = kernel.nbytes / (2 * 4 * WIDTH**2)  # read and written, four bytes each
            return ratio * layers * jitter.expovariate(1)
        return 0.5 if operator == "aten::mm" else 0.0  # two per layer

    return duration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, action="append", help="repeatable (default: 20, 40, 60)")
    parser.add_argument("--seeds", type=int, default=20, help="random communication times to average over")
    parser.add_argument("--output", type=Path, default=Path("outputs", "overlap_simulation"))
    arguments = parser.parse_args()
    from lightning_zeroplus.testing import RankPool

    arguments.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with RankPool(2, timeout=90) as ranks:
        for layers in arguments.layers or [20, 40, 60]:
            variants = [Variant("DeepSpeed", None), *(Variant(f"{count} buffers", count) for count in BUFFERS)]
            variants.append(Variant("bound", layers))
            for variant in variants:
                gantt = arguments.output.resolve() / f"gantt-{layers}-{variant.name.replace(' ', '-')}.png"
                results = ranks.run(simulate, layers, variant, arguments.seeds, str(gantt))
                rows += [
                    {
                        "layers": layers,
                        "ratio": ratio,
                        "way": variant.name,
                        # The slower rank of each random draw.
                        "makespans": [max(pair) for pair in zip(*(spans[str(ratio)] for spans, _ in results))],  # noqa: B905
                        "races": sum(races for _, races in results),
                    }
                    for ratio in RATIOS
                ]
    (arguments.output / "overlap_simulation.json").write_text(json.dumps(rows, indent=1))
    show(rows)
    plot(rows, arguments.output / "overlap_simulation.png")
    print(f"{arguments.output}: table, plot and Gantt charts")


def _relative(rows: list[dict[str, Any]], row: dict[str, Any]) -> float:
    """Mean over the random draws of the makespan over the bound's."""
    (bound,) = (r for r in rows if (r["layers"], r["ratio"], r["way"]) == (row["layers"], row["ratio"], "bound"))
    ratios = [a / b for a, b in zip(row["makespans"], bound["makespans"], strict=True)]
    return sum(ratios) / len(ratios)


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    ways = list(dict.fromkeys(row["way"] for row in rows if row["way"] != "bound"))
    table = Table("layers", "comm. / compute", *ways, title="Simulated makespan of a ZeRO-2 backward over the bound")
    for layers in sorted({row["layers"] for row in rows}):
        for ratio in RATIOS:
            cells = {row["way"]: row for row in rows if (row["layers"], row["ratio"]) == (layers, ratio)}
            table.add_row(str(layers), f"{ratio:.1f}", *(f"{_relative(rows, cells[way]):.3f}" for way in ways))
    Console().print(table)
    for way in ways:
        print(f"{way}: {sum(row['races'] for row in rows if row['way'] == way and row['ratio'] == RATIOS[0])} races")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = sorted({row["layers"] for row in rows})
    ways = list(dict.fromkeys(row["way"] for row in rows if row["way"] != "bound"))
    figure, axes = plt.subplots(1, len(sizes), figsize=(4 * len(sizes), 3.2), squeeze=False, layout="constrained")
    for axis, layers in zip(axes[0], sizes, strict=True):
        for way in ways:
            cells = [row for row in rows if (row["layers"], row["way"]) == (layers, way)]
            axis.plot([row["ratio"] for row in cells], [_relative(rows, row) for row in cells], marker="o", label=way)
        axis.set_title(f"{layers} layers", fontsize=10)
        axis.set_xlabel("communication / compute")
        axis.set_ylabel("makespan / bound")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
