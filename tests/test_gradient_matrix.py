"""The gradient matrix: stage x precision x loop x reduction, each cell against the reference. ``pytest -m matrix``."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.cells import BOUNDS, Cell, run_cell
from tests.patterns import PATTERNS

STAGES = (0, 1, 2, 3)
#: Patterns that also make sense in low precision with every storage layout.
CORE = ("single", "several", "unused", "leaf_hook")


def _cells() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}

    def add(label: str, cell: Cell) -> None:
        offload = f"-offload_{cell.offload}" if cell.offload else ""
        name = f"stage{cell.stage}-{cell.precision}-{cell.pattern}-{cell.optimizer}-{cell.reduction}{offload}"
        assert cells.setdefault(f"{name}-{label}" if label else name, cell) is cell, name

    for stage, pattern, reduction in product(STAGES, PATTERNS, ("auto", "backward")):
        add("", Cell(stage, pattern, reduction=reduction))
    for stage, pattern in product(STAGES, PATTERNS):
        add("", Cell(stage, pattern, precision="bf16-true"))
    for stage, pattern in product(STAGES, ("several", "leaf_hook")):
        add("", Cell(stage, pattern, precision="bf16-mixed"))
    for stage, pattern in product(STAGES, ("single", "several", "shared_forward", "nested")):
        add("", Cell(stage, pattern, optimizer="adamw"))
    for stage in STAGES:
        base = Cell(stage, "several")
        for reduction in ("auto", "backward"):
            both = replace(base, reduction=reduction)
            add("across_steps", replace(both, across=2))
            add("zero_grad_before", replace(both, zero_grad="before"))
            add("discard", replace(both, zero_grad="discard"))
            add("accumulate", replace(both, pattern="single", automatic=True, across=4))
        add("accumulate", replace(base, pattern="single", automatic=True, across=4, precision="bf16-true"))
        add("automatic", replace(base, pattern="leaf_hook", automatic=True))
        for limit, algorithm in ((0.05, "norm"), (0.01, "value")):
            add(f"clip_{algorithm}", replace(base, clip=(limit, algorithm)))
            add(f"clip_{algorithm}", replace(base, clip=(limit, algorithm), precision="bf16-true"))
    for stage, pattern in product(STAGES, ("several", "unused", "shared_forward", "leaf_hook")):
        add("", Cell(stage, pattern, precision="16-true"))
    for stage in STAGES:
        add("", Cell(stage, "several", precision="16-mixed"))
        add("clip_norm", Cell(stage, "several", precision="16-true", clip=(0.05, "norm")))
        add("clip_value", Cell(stage, "several", precision="16-true", clip=(0.01, "value")))
    for stage, pattern in product((1, 2, 3), CORE):
        base = Cell(stage, pattern)
        add("overlap", replace(base, zero={"overlap_comm": True}))
        add("not_contiguous", replace(base, zero={"contiguous_gradients": False}))
        add("all_reduce", replace(base, zero={"reduce_scatter": False}))
        add("one_bucket", replace(base, zero={"reduce_bucket_size": 100_000}))
        add("", replace(base, offload="cpu"))
        add("", replace(base, offload="cpu", precision="bf16-true"))
        add("fp32_accumulation", replace(base, precision="bf16-true", grad_accum_dtype="fp32"))
    for stage in (1, 2, 3):
        add("across_steps", Cell(stage, "unused", across=2, offload="cpu"))
        add("clip_value", Cell(stage, "several", clip=(0.01, "value"), offload="cpu"))
    add("fp32_accumulation", Cell(1, "unused", precision="bf16-true", grad_accum_dtype="fp32", reduction="backward"))
    return cells


CELLS = _cells()


def check(cell: Cell, outcomes: list[Any]) -> None:
    """Assert that every rank's outcome is within the stated bounds."""
    for outcome in outcomes:
        assert outcome.error <= BOUNDS[cell.kind], outcome
        assert outcome.norm_error <= BOUNDS[cell.kind], outcome
        assert not outcome.frozen, outcome
        if cell.kind == "32" and cell.optimizer == "sgd" and cell.clip is None:
            assert outcome.first_step_exact, outcome


@pytest.mark.matrix
@pytest.mark.parametrize("name", CELLS)
def test_cell(ranks2: Any, name: str) -> None:
    check(CELLS[name], ranks2.run(run_cell, CELLS[name]))


def test_enough_cells() -> None:
    assert len(CELLS) >= 120
