"""How the host's part of a step grows: with the parameters, and with the backwards of a window, beside DDP.

The model is many linear layers so small that their arithmetic is next to nothing. The contenders are those of
``peers.py``, trained in the same way. Every contender at every size has processes of its own, and they all take turns,
so that other programs on the machine slow all of them. A turn is two steps, of which the second counts: the first finds
the processor's caches as the other contenders have left them. What counts is the CPU time of the slowest rank, in which
the time that it waits is not included.

- ``parameters``: the time of a step over the number of parameters; the slope between one number and the one before, and
  that slope divided by DDP's.
- ``backwards``: the time that one more backward of a window costs, from the least number of backwards to each other,
  divided by that of DDP, whose window is ``no_sync()``. Both are Lightning's ``accumulate_grad_batches``.

Slopes and their ratios are taken round by round; reported are the medians.

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
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import peers

CONTENDERS = ("ddp", *(f"zeroplus_{stage}" for stage in range(4)), "zeroplus_fsdp")
PARAMETERS = (10, 100, 1_000, 10_000)
BACKWARDS = (1, 4, 16, 64)
#: The parameters of the model whose backwards are counted.
WINDOW = 100
#: Of a layer: two of the linear part, two of the norm.
_PER_LAYER = 4
#: Of a turn; the last one counts.
_STEPS = 2
#: Turns.
_WARMUP = 2
_WIDTH, _ROWS = 8, 1


#: Seconds of a step in each round, by number and contender; the numbers in increasing order.
Taken = dict[tuple[int, str], list[float]]


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
    parser.add_argument("--rounds", type=int, default=20, help="turns of which the median counts")
    parser.add_argument("--output", type=Path, default=Path("outputs", "growth"))
    chosen = parser.parse_args(arguments)
    contenders = [name for name in CONTENDERS if not chosen.contender or name in ("ddp", *chosen.contender)]
    numbers = {"parameters": chosen.parameters or PARAMETERS, "backwards": chosen.backwards or BACKWARDS}
    peers.prepare()
    rows: list[Row] = []
    for what, several in numbers.items():
        # Here all layers are one unit of FSDP2, which is sharded as a whole.
        names = [name for name in contenders if name != "zeroplus_fsdp" or what == "backwards"]
        taken = measure(what, sorted(set(several)), names, chosen.ranks, chosen.rounds)
        rows += grown(what, taken)
        print(table([row for row in rows if row.what == what]), flush=True)
    chosen.output.mkdir(parents=True, exist_ok=True)
    (chosen.output / "growth.json").write_text(json.dumps([row._asdict() for row in rows], indent=1))
    (chosen.output / "growth.md").write_text(table(rows))
    print(f"{chosen.output / 'growth'}.json and .md")


def measure(what: str, numbers: list[int], contenders: list[str], ranks: int, rounds: int) -> Taken:
    """Let all contenders at all sizes take turns."""
    import torch.multiprocessing

    fork = torch.multiprocessing.get_context("fork")
    teams: dict[tuple[int, str], peers.Team] = {}
    for number in numbers:
        parameters, backwards = (number, 1) if what == "parameters" else (WINDOW, number)
        shape = peers.Shape(max(1, round(parameters / _PER_LAYER)), _WIDTH, _ROWS, transformer=False)
        for name in contenders:
            steps = _STEPS * (_WARMUP + rounds)
            job = peers.Job(name, shape, 0, ranks, backwards, steps, peers._free_port())
            teams[number, name] = peers.Team(fork, job, _train)
            teams[number, name].wait()  # until they are ready for the first step
    taken: Taken = {key: [] for key in teams}
    for turn in range(_WARMUP + rounds):
        for key, team in teams.items():
            seconds = [team.step() for _ in range(_STEPS)]
            if turn >= _WARMUP:
                taken[key].append(seconds[-1])
    for team in teams.values():
        team.close()
    return taken


def _train(job: peers.Job, end: Connection) -> None:
    """Train one contender on one rank; does not return."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port), "WORLD_SIZE": str(job.ranks)}
    os.environ.update(rendezvous, RANK=str(job.rank), LOCAL_RANK=str(job.rank), NODE_RANK="0")
    sys.argv = sys.argv[:1]
    try:
        with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):
            peers._train_lightning(job, peers.Turns(job, end, time.process_time))
    except BaseException as error:
        end.send(f"{job.contender}, rank {job.rank}: {type(error).__name__}: {error}")
    os._exit(0)  # gloo's threads may outlive the interpreter


def grown(what: str, taken: Taken) -> list[Row]:
    """What each further parameter, or backward, costs.

    Args:
        what: What is counted: ``"parameters"``, from one number to the next, or ``"backwards"``, from the first.
        taken: Of :func:`measure`.
    """
    numbers = list(dict.fromkeys(number for number, _ in taken))
    rows = []
    marginal: Taken = {}
    for (number, name), seconds in taken.items():
        at = numbers.index(number)
        own = ratio = None
        if at:
            before = numbers[at - 1] if what == "parameters" else numbers[0]
            pairs = zip(seconds, taken[before, name], strict=True)
            marginal[number, name] = [1e3 * (late - early) / (number - before) for late, early in pairs]
            own = statistics.median(marginal[number, name])
            ddp = zip(marginal[number, name], marginal[number, "ddp"], strict=True)
            ratio = statistics.median(each / other for each, other in ddp)
        rows.append(Row(what, number, name, 1e3 * statistics.median(seconds), own, ratio))
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
