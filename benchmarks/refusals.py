"""What we refuse, under others: FSDP2 wrapped by hand, and accelerate with DeepSpeed.

    pip install accelerate
    python benchmarks/refusals.py --output docs/refusals.md

Each program of `benchmarks/refused.py` stands for programs of tests/programs that some of our strategies refuse. It is
a plain loop of torch, and it runs on two CPU processes under the peer of each strategy that refuses it. Its weights are
compared with the weights under DDP.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from refused import KINDS, Kind, make_peer
from torch import Tensor

from lightning_zeroplus.table import print_table
from lightning_zeroplus.testing import RankError, RankPool
from tests.conftest import settle
from tests.support.forkserver import fork_server

_TIME_LIMIT_S = 30.0
#: Largest relative error of all updates together, by the dtype of the most precise parameter.
_BOUNDS = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float64: 1e-12}
_INTRODUCTION = f"""# Refusals, and what others do

Made by `benchmarks/refusals.py`. [Compatibility](compatibility.md) lists the programs that some of our strategies
refuse. Here a plain loop of torch stands for each kind of them, and runs under others, on two CPU processes: FSDP2
wrapped by hand where `zeroplus_fsdp` refuses, and [accelerate](https://pypi.org/project/accelerate/) {{accelerate}}
with DeepSpeed {{deepspeed}} at each ZeRO stage that refuses.

`equal`: the weights and their dtypes are DDP's. The relative error of all updates together is at most
{_BOUNDS[torch.float32]:g}, in float64 {_BOUNDS[torch.float64]:g}. `other weights`: it trains, and no error says that
the weights are not DDP's. `hangs`: nothing for {_TIME_LIMIT_S:.0f} seconds. Everything else is the error.
"""


class Cell(NamedTuple):
    """One program under one peer."""

    verdict: str
    details: str
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kind", action="append", help="name of a kind, repeatable (default: all)")
    parser.add_argument("--output", type=Path, default=Path("outputs", "refusals.md"))
    arguments = parser.parse_args()
    kinds = [kind for kind in KINDS if not arguments.kind or kind.name in arguments.kind]
    results = {(kind.name, peer): run(kind, peer) for kind in kinds for peer in kind.peers}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(page(kinds, results), encoding="utf-8")
    rows = [(kind, peer, cell.verdict, f"{cell.seconds:.1f}") for (kind, peer), cell in results.items()]
    print_table("What we refuse, under others", ("program", "under", "result", "s"), rows, right=(3,))


def run(kind: Kind, peer: str) -> Cell:
    """Run one cell on new ranks: a program that fails may leave anything behind."""
    begin = time.monotonic()
    with RankPool(2, timeout=_TIME_LIMIT_S, initializer=settle, mp_context=fork_server()) as ranks:
        expected = ranks.run(_train, kind.name, "ddp")[0]
        try:
            got = ranks.run(_train, kind.name, peer)[0]
        except RankError as failed:
            verdict, details = _failure(str(failed))
            return Cell(verdict, details, time.monotonic() - begin)
    start = expected.pop("start")
    got.pop("start")
    error = _error(start, expected, got)
    bound = min(_BOUNDS[each.dtype] for each in expected.values())
    same_dtypes = all(expected[name].dtype == got[name].dtype for name in expected)
    verdict = "equal" if error <= bound and same_dtypes else "other weights"
    return Cell(verdict, f"relative error {error:.1e}", time.monotonic() - begin)


def _train(name: str, peer: str) -> dict[str, Any]:
    """Train under a peer and return the whole weights, and those at the start, which are the same everywhere."""
    kind = next(each for each in KINDS if each.name == name)
    torch.manual_seed(0)
    made = make_peer(peer)
    module = kind.build()
    start = {name: param.detach().clone() for name, param in module.named_parameters()}
    trained = kind.train(made, module)
    return {**made.weights(trained), "start": start}


def _failure(message: str) -> tuple[str, str]:
    last = [line.strip() for line in message.splitlines() if line.strip()]
    found = [line for line in last if "Error: " in line or line.endswith("Error")]
    if "did not answer" in message or "time limit" in message or (not found and "within" in message):
        return "hangs", last[0]
    text = found[0] if found else last[0]
    text = re.sub(r"\[/\S+\] | at \"/\S+|0x\w+|\[[\d.]+\]:\d+", "", text)  # files, addresses and ports of this run
    return "error", " ".join(text.split())[:120]


def _error(start: dict[str, Tensor], expected: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    assert expected.keys() == got.keys()
    difference = sum(float((got[name] - expected[name]).abs().double().square().sum()) for name in expected)
    update = sum(float((expected[name] - start[name]).abs().double().square().sum()) for name in expected)
    assert update > 0, "DDP has trained nothing"
    return float((difference / update) ** 0.5)


def page(kinds: list[Kind], results: dict[tuple[str, str], Cell]) -> str:
    """The page of the docs."""
    from importlib.metadata import version

    introduction = _INTRODUCTION.format(accelerate=version("accelerate"), deepspeed=version("deepspeed"))
    peers = ("FSDP2 by hand", *(f"accelerate, ZeRO-{stage}" for stage in (1, 2, 3)))
    equal = sum(cell.verdict == "equal" for cell in results.values())
    lines = [introduction, f"{len(kinds)} kinds, {len(results)} cells, {equal} equal.", ""]
    columns = ("program", *peers, "trains under ours", "stands for")
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    notes: dict[str, int] = {}
    for kind in kinds:
        cells = [_cell(results.get((kind.name, peer)), notes) for peer in peers]
        names = ", ".join(f"`{name}`" for name in kind.programs)
        lines.append(f"| {kind.what} | " + " | ".join(cells) + f" | {kind.ours} | {names} |")
    lines += ["", "## Errors", "", *(f"{number}. {text}" for text, number in notes.items()), ""]
    return "\n".join(lines)


def _cell(cell: Cell | None, notes: dict[str, int]) -> str:
    if cell is None:
        return "-"
    if cell.verdict != "error":
        return cell.verdict
    text = cell.details.replace("|", "\\|").replace("<", "&lt;")
    return f"error [{notes.setdefault(text, len(notes) + 1)}](#errors)"


if __name__ == "__main__":
    main()
