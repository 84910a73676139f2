"""Thousands of steps: whether memory stays flat, and the parameters those of a single process.

Two CPU ranks train a tiny model; every step has two backwards in a coalesce() window and one of its own. The resident
set of every rank is read after a tenth of the steps and at the end; the parameters are compared with a reference that
knows nothing of ZeRO. ``--compile`` trains stage 3 with DeepCompile instead.

    python benchmarks/soak.py --steps 2000
    python benchmarks/soak.py --steps 500 --compile
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from lightning_zeroplus.testing import RankPool
from tests.support.soak import soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--stage", type=int, action="append", help="repeatable (default: 0 to 3; 3 with --compile)")
    parser.add_argument("--compile", action="store_true", help="compile with DeepCompile, backend eager")
    arguments = parser.parse_args()
    print("| stage | steps | seconds | RSS growth, the larger | error, relative |\n|---|---|---|---|---|")
    with RankPool(2, timeout=1800) as ranks:
        for stage in arguments.stage or ([3] if arguments.compile else [0, 1, 2, 3]):
            start = time.perf_counter()
            outcomes = ranks.run(soak, stage, arguments.steps, arguments.compile)
            seconds = time.perf_counter() - start
            growth, error = max(each.growth for each in outcomes), max(each.error for each in outcomes)
            name = f"{stage}, compiled" if arguments.compile else str(stage)
            print(f"| {name} | {arguments.steps} | {seconds:.0f} | {growth:.2%} | {error:.1e} |", flush=True)


if __name__ == "__main__":
    main()
