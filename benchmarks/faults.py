"""Every fault at every stage: seconds until all ranks have ended, and whether the user sees the first error first.

Each cell is a job of two processes, started by the strategy's own launcher; tests/faults says what happens in it.

    python benchmarks/faults.py --output docs/faults.md
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.faults.jobs import FAULTS, Outcome, run_job

STAGES = ("0", "1", "2", "3", "fsdp")
_INTRODUCTION = """# The table of faults

Made by `benchmarks/faults.py`, on two CPU processes over gloo. Every cell is a job in which one rank (rank 1, if
nothing else is said) meets the fault in its fourth step: the seconds from then until all ranks had ended, and whether
the first error that the user sees is the one that happened. Where a process was left behind, or the exit status was not
[the documented one](reliability.md), the cell marks it. The configured time limit of collectives is 10 s for the faults
that only it can end (stopped, no length) and for the slow rank, and 30 minutes for all others.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--stage", action="append", choices=STAGES, help="repeatable (default: all)")
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="repeatable (default: all)")
    parser.add_argument("--output", type=Path, default=Path("outputs", "faults.md"))
    arguments = parser.parse_args()
    stages, faults = arguments.stage or STAGES, arguments.fault or list(FAULTS)
    cells: dict[tuple[str, str], str] = {}
    for name in faults:
        for stage in stages:
            with tempfile.TemporaryDirectory() as folder:
                cells[name, stage] = cell(name, run_job(name, stage, Path(folder)))
            print(f"{name}, stage {stage}: {cells[name, stage]}", flush=True)
    lines = [
        _INTRODUCTION,
        "| fault | " + " | ".join(stage if stage == "fsdp" else f"stage {stage}" for stage in stages) + " |",
        "|---|" + "---|" * len(stages),
        *(f"| {name} | " + " | ".join(cells[name, stage] for stage in stages) + " |" for name in faults),
    ]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def cell(name: str, outcome: Outcome) -> str:
    """Seconds, and what is not as it should be."""
    fault = FAULTS[name]
    if fault.shows is None and fault.status == 0:
        return "no error" if outcome.status == 0 and not outcome.errors else f"status {outcome.status}"
    shown = "yes" if outcome.first_error_shown(fault) else "**no**"
    problems = [f"**{len(outcome.left)} left**"] * bool(outcome.left)
    problems += [f"**status {outcome.status}**"] * (outcome.status != fault.status)
    return ", ".join([f"{outcome.seconds:.1f} s", shown, *problems])


if __name__ == "__main__":
    main()
