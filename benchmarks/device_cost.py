"""What a training step costs a GPU, counted on two simulated CUDA devices, or on real ones.

    python benchmarks/device_cost.py
    python benchmarks/device_cost.py --strategy 2 --strategy ddp --backwards 8 --places
    python benchmarks/device_cost.py --strategy 3 --config my_deepspeed.json --precision bf16-true --clip
    python benchmarks/device_cost.py --device cuda

A small network is trained for three steps, in manual optimization with AdamW; the third step of rank 0 is counted. The
first row is plain torch on one rank. It shows how many kernels the model and its optimizer launch by themselves.
"Held back": DeepSpeed lets the host wait for an event of three collectives ago, to bound the memory that is allocated
ahead. The simulated device answers that it is not over yet, so this is the most that it can be.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from lightning_zeroplus.testing import RankPool
from tests.conftest import Ranks, settle
from tests.testing.simulated_cuda.cost import Case, Cost, measure

_STRATEGIES = ("0", "1", "2", "3", "fsdp")
_HEAD = (
    "| strategy | window | kernels | collectives | host waits in the backwards | in the step | held back | events |"
    " peak KiB |\n|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--strategy", action="append", help=f"stage, fsdp or ddp; repeatable (default: {_STRATEGIES})")
    parser.add_argument("--backwards", type=int, default=2, help="backwards per step")
    parser.add_argument("--layers", type=int, default=4, help="linear layers, with two parameters each")
    parser.add_argument("--width", type=int, default=16, help="features of each layer")
    parser.add_argument("--precision", default="32-true", help="the Trainer's")
    parser.add_argument("--clip", action="store_true", help="clip the norm of the gradient")
    parser.add_argument("--config", type=Path, help="a DeepSpeed config, as JSON")
    parser.add_argument("--device", choices=("simulated_cuda", "cuda"), default="simulated_cuda")
    parser.add_argument("--places", action="store_true", help="also print where the host waits")
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text(encoding="utf-8")) if arguments.config else None
    shared = {name: getattr(arguments, name) for name in ("backwards", "layers", "width", "precision", "clip")}
    print(_HEAD)
    with Ranks(2, timeout=300, initializer=settle, device=arguments.device) as ranks:
        _row("plain torch", Case(None, **shared), ranks, arguments.places)
        for name in arguments.strategy or _STRATEGIES:
            strategy = int(name) if name.isdigit() else name
            for window in (False, True) if name != "ddp" else (False,):
                _row(name, Case(strategy, window=window, config=config, **shared), ranks, arguments.places)


def _row(name: str, case: Case, ranks: RankPool, places: bool) -> None:
    cost: Cost = ranks.run(measure, case)[0]
    cells = [
        name,
        "yes" if case.window else "",
        *cost[:4],
        cost.held_back,
        cost.events,
        f"{cost.peak_bytes / 1024:.1f}",
    ]
    print("|", " | ".join(map(str, cells)), "|", flush=True)
    for place in cost.places if places else ():
        print(f"  {place}")


if __name__ == "__main__":
    main()
