"""Every program of tests/programs under every strategy: equal to DDP, or refused.

    python benchmarks/compatibility.py --output docs/compatibility.md

runs all cells. What a run of the tests has found can be used again:

    python -m pytest --every-cell tests/programs --junitxml outputs/programs.xml
    python benchmarks/compatibility.py --results outputs/programs.xml --output docs/compatibility.md
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.conftest import Ranks, settle
from tests.programs.cell import Cells
from tests.programs.comparison import BOUNDS
from tests.programs.program import COMPILE, FAMILIES, STRATEGIES, Program, programs
from tests.support.forkserver import fork_server

#: ``(program, strategy)`` to verdict and details.
Results = dict[tuple[str, str], tuple[str, str]]
_COLUMNS = {name: name.removeprefix("stage").replace("_", ", ") for name in STRATEGIES}
_TITLES = {
    "ordinary": "Ordinary training", "manual_loops": "Manual loops", "ranks": "Ranks that differ",
    "derivatives": "Backwards by hand, and higher derivatives", "gradients": "Gradients by hand",
    "kept_gradients": "Gradients that are kept as tensors",
    "weights": "Weights by hand, and teachers", "kept_views": "Tensors that follow a weight",
    "graph_views": "Weights that are written between a forward and its backward",
    "optimizers": "Optimizers",
    "optimizer_states": "Optimizer states",
    "replaced_optimizers": "Optimizers that take the place of others",
    "whole_tensors": "Optimizers of whole tensors",
    "averages": "Averages of weights", "norms": "Norms of gradients", "one_file": "Checkpoints in one file",
    "saves": "Checkpoints that are smaller, or written in the background",
    "frozen": "Checkpoints of other frozen parameters",
    "wrapped": "Layers in torch's activation checkpointing",
    "stopped": "Fits that a signal stops",
    "contrastive": "Contrastive losses in chunks",
    "several_optimizers": "Several optimizers",
    "shared_parameters": "Several optimizers of the same parameters",
    "callbacks": "Callbacks", "modules": "Layers", "more_modules": "Parameters and buffers",
    "own_parameters": "Parameters in no layer", "buffers": "Buffers in manual loops",
    "begins": "Ranks that begin differently, and layers that are synchronized",
    "everyday": "Around an ordinary module",
    "torch_tools": "Tools of torch", "precision": "Precision", "mixed": "Mixed precision",
    "tools": "Tuners, schedules, unusual optimizers and modules",
    "lifecycle": "Checkpoints and life cycle", "hugging_face": "Hugging Face", "adapters": "Adapters of peft",
    "fabric": "Fabric",
    "fabric_modules": "Fabric: modules and weights",
    "fabric_models": "Fabric: several models",
    "fabric_files": "Fabric: checkpoints",
    "fabric_loops": "Fabric: between backwards",
    "own_kernels": "Kernels, overloads, arrays and addresses",
    "packages": "Losses, layers and optimizers of packages",
    "gathered": "Weights within `zp.gathered()`",
    "hooked": "Hooks after accumulation",
    "in_backwards": "Within a backward",
    "unreduced": "Gradients read while some of them are not reduced",
    "shared_memory": "Weights with common memory",
    "watched": "Loggers, metrics, and states besides weights",
    "own_forwards": "Modules that change their weights in their own forward",
    "containers": "Containers that layers write to, and what they return",
    "identities": "Parameters known by class, attribute or identity",
    "evaluations": "Evaluation steps with gradients",
    "not_finite": "Gradients that are infinite or NaN",
    "own_steps": "Steps without Lightning's wrapper",
    "habits": "Further habits", "late_changes": "Changes while a fit runs",
    "clipping": "Gradients that are clipped twice",
    "kept_parameters": "Parameters kept since `__init__`",
    "papers": "Methods of papers", "step_hooks": "Hooks of an optimizer's step",
    "outside": "Parameters that no optimizer has",
}  # fmt: skip
_INTRODUCTION = f"""# Compatibility

Made by `benchmarks/compatibility.py`, on two CPU processes over gloo. Each row is a program of `tests/programs`: a
small but whole use of the Trainer or of Fabric, written as for DDP. Each cell is this program under one of our
strategies: ZeRO stages 0 to 3, with everything partitioned and small buckets, and `zeroplus_fsdp`. The columns `2`,
`3`, `fsdp`, `offload` and `wrap` reduce in every backward. `step` is `reduction="step"`. `large` and `mixed` have the
default, which is to reduce once per step here. `large` has the sizes that DeepSpeed has by default, with which nothing
of these models is partitioned. `mixed` partitions matrices, and no biases, as DeepSpeed does with larger models.
`offload` is `offload="cpu"`. `wrap` is `wrap=1`: each layer is gathered by itself, in the forward and again in the
backward.

`equal`: parameters, buffers, every logged metric and the number of steps are DDP's, and the ranks agree with each
other. The relative error of each tensor, and of all updates together, is at most {BOUNDS["32"]:g}. In 16 bits the
reference is the program in fp32; the updates' error is at most {BOUNDS["bf16"]:g} (bf16) or {BOUNDS["16"]:g} (fp16).
For the programs of mixed precision it is DDP in the same precision; the error is at most {BOUNDS["mixed"]:g}.
The reference of programs marked * is one process that sees all batches: DDP cannot run them, or gets them wrong.

A number is a refusal, listed below: an exception on all ranks, before anything has been trained wrongly.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--program", action="append", help="name or pattern, repeatable (default: all)")
    parser.add_argument("--results", type=Path, help="what `pytest --junitxml` has written; nothing is run")
    parser.add_argument("--output", type=Path, default=Path("outputs", "compatibility.md"))
    arguments = parser.parse_args()
    patterns = arguments.program or ["*"]
    chosen = {name: each for name, each in programs().items() if any(fnmatch.fnmatch(name, p) for p in patterns)}
    results = read(arguments.results) if arguments.results else run(chosen.values())
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(table(chosen, results), encoding="utf-8")


def read(path: Path) -> Results:
    """The cells in a file of ``pytest --junitxml``."""
    results: Results = {}
    for case in ElementTree.parse(path).iter("testcase"):
        found = re.fullmatch(r"test_program\[(\w+)-(\w+)\]", case.get("name", ""))
        if found is None or case.find("skipped") is not None:
            continue
        said = {each.get("name"): each.get("value", "") for each in case.iter("property")}
        results[found[1], found[2]] = said.get("verdict", "fails"), said.get("details", "")
    return results


def run(chosen: Iterable[Program]) -> Results:
    """Run all cells of these programs."""
    results: Results = {}
    with tempfile.TemporaryDirectory() as folder, Ranks(2, 90, settle, fork_server()) as ranks:
        cells = Cells(Path(folder))
        for program in chosen:
            for strategy in program.strategies:
                outcome = cells.run(ranks, program, strategy)
                results[program.name, strategy] = outcome.verdict, outcome.details
                print(f"{program.name}, {strategy}: {outcome.verdict}, {outcome.seconds:.1f} s", flush=True)
    return results


def table(chosen: dict[str, Program], results: Results) -> str:
    """The page: a table per family, the refusals, what was asked for besides."""
    notes: dict[str, int] = {}
    lines = [_INTRODUCTION, _counts(results), ""]
    for family in FAMILIES:
        members = [program for program in chosen.values() if program.family == family]
        if not members:
            continue
        lines += [f"## {_TITLES[family]}", "", "| program | " + " | ".join(_COLUMNS.values()) + " | also |"]
        lines.append("|---|" + "---|" * (len(_COLUMNS) + 1))
        lines += [_row(program, results, notes) for program in members]
        lines.append("")
    if notes:
        lines += ["## Refusals", "", *(f"{number}. {text}" for text, number in notes.items()), ""]
    return "\n".join(lines)


def _counts(results: Results) -> str:
    verdicts = [verdict for verdict, _ in results.values()]
    names = {name for name, _ in results}
    wrong = len(verdicts) - verdicts.count("equal") - verdicts.count("refused")
    return (
        f"{len(names)} programs, {len(verdicts)} cells: {verdicts.count('equal')} equal, {verdicts.count('refused')}"
        f" refused, {wrong} neither."
    )


def _row(program: Program, results: Results, notes: dict[str, int]) -> str:
    cells = [_cell(results.get((program.name, strategy)), notes) for strategy in STRATEGIES]
    also = [
        f"{strategy.replace('_', ', ')}: {_cell(results.get((program.name, strategy)), notes)}"
        for strategy in COMPILE
        if (program.name, strategy) in results
    ]
    mark = "\\*" if program.reference == "single" else ""
    return f"| `{program.name}`{mark}: {program.what} | " + " | ".join([*cells, "; ".join(also)]) + " |"


def _cell(result: tuple[str, str] | None, notes: dict[str, int]) -> str:
    if result is None:
        return "-"
    verdict, details = result
    if verdict == "refused":
        # Names of parameters, operations and files differ from program to program, the refusal does not.
        text = re.sub(r"'[\w./-]+'", "'...'", details)
        text = re.sub(r"(ZeRO stage 3\), and )`[\w.]+`", r"\1`...`", text)
        text = re.sub(r"ZeRO stage \d (partitions|trains)", r"the ZeRO stage \1", text)
        text = " ".join(text.replace("|", "\\|").split())
        return f"[{notes.setdefault(text, len(notes) + 1)}](#refusals)"
    return "equal" if verdict == "equal" else f"**{verdict}**"


if __name__ == "__main__":
    main()
