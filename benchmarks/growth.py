"""How the host's part of a step grows: with the parameters, and with the backwards of a window, beside DDP.

The model is many linear layers so small that their arithmetic is next to nothing. The contenders are those of
``peers.py``, trained in the same way; they take turns, step by step, so that other programs on the machine slow all of
them. Reported is the CPU time of a rank, which does not count that it waits; the median of its steps.

- ``parameters``: the time of a step over the number of parameters; the slope between one number and the one before, and
  that slope divided by DDP's.
- ``backwards``: the time that one more backward of a window costs, from the least number of backwards to each other,
  divided by that of DDP, whose window is ``no_sync()``. Both are Lightning's ``accumulate_grad_batches``.

    python benchmarks/growth.py --parameters 10 --parameters 1000 --backwards 1 --backwards 64
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import peers

CONTENDERS = ("ddp", *(f"zeroplus_{stage}" for stage in range(4)), "zeroplus_fsdp")
PARAMETERS = (10, 100, 1_000, 10_000)
BACKWARDS = (1, 4, 16, 64)
#: The parameters of the model whose backwards are counted.
WINDOW = 100
#: Of a layer: two of the linear part, two of the norm.
_PER_LAYER = 4
_WARMUP = 3
_WIDTH, _ROWS = 8, 1


class Row(NamedTuple):
    """One contender at one size; ``marginal`` is milliseconds per further parameter, or backward."""

    what: str
    number: int
    contender: str
    milliseconds: float
    marginal: float | None
    to_ddp: float | None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="repeatable (default: all)")
    parser.add_argument("--parameters", type=int, action="append", help=f"repeatable (default: {PARAMETERS})")
    parser.add_argument("--backwards", type=int, action="append", help=f"per step; repeatable (default: {BACKWARDS})")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="steps of which the median counts")
    parser.add_argument("--output", type=Path, default=Path("outputs", "growth"))
    chosen = parser.parse_args(arguments)
    contenders = [name for name in CONTENDERS if not chosen.contender or name in ("ddp", *chosen.contender)]
    numbers = {"parameters": chosen.parameters or PARAMETERS, "backwards": chosen.backwards or BACKWARDS}
    peers.prepare()
    rows: list[Row] = []
    for what, several in numbers.items():
        # Here all layers are one unit of FSDP2, which is sharded as a whole.
        names = [name for name in contenders if name != "zeroplus_fsdp" or what == "backwards"]
        taken: dict[tuple[int, str], float] = {}
        for number in sorted(set(several)):
            size, backwards = (number, 1) if what == "parameters" else (WINDOW, number)
            for name, seconds in measure(names, size, backwards, chosen.ranks, chosen.rounds).items():
                taken[number, name] = seconds
        rows += grown(what, taken)
        print(table([row for row in rows if row.what == what]), flush=True)
    chosen.output.mkdir(parents=True, exist_ok=True)
    (chosen.output / "growth.json").write_text(json.dumps([row._asdict() for row in rows], indent=1))
    (chosen.output / "growth.md").write_text(table(rows))
    print(f"{chosen.output / 'growth'}.json and .md")


class Clock(peers.Turns):
    """Takes the CPU time of each step of one rank, which waits for its turn."""

    def begin(self) -> None:
        super().begin()
        self._started = time.process_time()

    def end(self, loss: Any) -> None:
        self._end.send(time.process_time() - self._started)
        self._left -= 1
        if not self._left:
            self._end.send(0.0)


def measure(contenders: list[str], parameters: int, backwards: int, ranks: int, rounds: int) -> dict[str, float]:
    """The median CPU time of a step, in seconds, of each contender's slowest rank."""
    import torch.multiprocessing

    fork = torch.multiprocessing.get_context("fork")
    shape = peers.Shape(max(1, round(parameters / _PER_LAYER)), _WIDTH, _ROWS, transformer=False)
    ends: dict[str, list[Connection]] = {}
    processes = []
    for name in contenders:
        port, ends[name] = peers._free_port(), []
        for rank in range(ranks):
            ours, theirs = fork.Pipe()
            job = peers.Job(name, shape, rank, ranks, backwards, _WARMUP + rounds, port)
            processes.append(fork.Process(target=_train, args=(job, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            ends[name].append(ours)
        peers._each(ends[name])  # they are ready for the first step
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(_WARMUP + rounds):
        for name in contenders:
            for end in ends[name]:
                end.send(None)
            seconds[name].append(float(max(peers._each(ends[name]))))
            peers._each(ends[name])  # they are ready for the next one, or at the end
    for process in processes:
        process.join(10)
        process.kill()
    return {name: statistics.median(each[_WARMUP:]) for name, each in seconds.items()}


def _train(job: peers.Job, end: Connection) -> None:
    """Train one contender on one rank; does not return."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port), "WORLD_SIZE": str(job.ranks)}
    os.environ.update(rendezvous, RANK=str(job.rank), LOCAL_RANK=str(job.rank), NODE_RANK="0")
    sys.argv = sys.argv[:1]
    try:
        with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):
            peers._train_lightning(job, Clock(job, end))
    except BaseException as error:
        end.send(f"{job.contender}, rank {job.rank}: {type(error).__name__}: {error}")
    os._exit(0)  # gloo's threads may outlive the interpreter


def grown(what: str, taken: dict[tuple[int, str], float]) -> list[Row]:
    """What each further parameter, or backward, costs.

    Args:
        what: What is counted: ``"parameters"``, from one number to the next, or ``"backwards"``, from the first.
        taken: Seconds by number and contender; the numbers in increasing order.
    """
    numbers = list(dict.fromkeys(number for number, _ in taken))
    rows = []
    marginal: dict[tuple[int, str], float] = {}
    for number, name in taken:
        at = numbers.index(number)
        if at:
            before = numbers[at - 1] if what == "parameters" else numbers[0]
            marginal[number, name] = 1e3 * (taken[number, name] - taken[before, name]) / (number - before)
        own, ddp = marginal.get((number, name)), marginal.get((number, "ddp"))
        ratio = None if own is None or not ddp else own / ddp
        rows.append(Row(what, number, name, 1e3 * taken[number, name], own, ratio))
    return rows


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| | number | contender | CPU ms of a step | ms for one more | ÷ DDP |", "|---|---|---|---|---|---|"]
    for row in rows:
        more = "" if row.marginal is None else f"{row.marginal:.4f}"
        ratio = "" if row.to_ddp is None else f"{row.to_ddp:.2f}"
        lines.append(f"| {row.what} | {row.number} | {row.contender} | {row.milliseconds:.2f} | {more} | {ratio} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
