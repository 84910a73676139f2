"""The gradient matrix: stage x precision x loop x reduction, each cell against the reference. ``pytest -m matrix``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.matrix.cells import BOUNDS, Cell, run_cell
from tests.support.patterns import PATTERNS
from tests.support.turns import turn

STAGES = (0, 1, 2, 3)
#: Patterns that also make sense in low precision with every storage layout.
CORE = ("single", "several", "unused", "leaf_hook")


def _cells() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}

    def add(label: str, cell: Cell) -> None:
        offload = f"-offload_{cell.offload}" if cell.offload else ""
        name = f"stage{cell.stage}-{cell.precision}-{cell.pattern}-{cell.optimizer}-{cell.reduction}{offload}"
        assert cells.setdefault(f"{name}-{label}" if label else name, cell) is cell, name

    for stage, pattern in product(STAGES, PATTERNS):
        add("", Cell(stage, pattern))
    for stage, pattern in product((0, 1), PATTERNS):  # where "auto" is "step"
        add("", Cell(stage, pattern, reduction="backward"))
    for stage, pattern in product(STAGES, (*CORE, "nested", "shared_forward", "idle")):
        add("", Cell(stage, pattern, precision="bf16-true"))
    for stage, pattern in product(STAGES, ("several", "leaf_hook")):
        add("", Cell(stage, pattern, precision="bf16-mixed"))
    for stage, pattern in product(STAGES, ("single", "several", "shared_forward", "nested")):
        add("", Cell(stage, pattern, optimizer="adamw"))
    for stage in STAGES:
        base = Cell(stage, "several")
        for reduction in ("auto", "backward")[: 2 if stage < 2 else 1]:
            both = replace(base, reduction=reduction)
            add("across_steps", replace(both, across=2))
            add("zero_grad_before", replace(both, zero_grad="before"))
            add("discard", replace(both, zero_grad="discard"))
            add("module_zero_grad", replace(both, zeroes="module"))
            add("discard-module_zero_grad", replace(both, zero_grad="discard", zeroes="module"))
            add("accumulate", replace(both, pattern="single", automatic=True, across=4))
        add("accumulate", replace(base, pattern="single", automatic=True, across=4, precision="bf16-true"))
        add("automatic", replace(base, pattern="leaf_hook", automatic=True))
        for limit, algorithm in ((0.05, "norm"), (0.01, "value")):
            add(f"clip_{algorithm}", replace(base, clip=(limit, algorithm)))
            add(f"clip_{algorithm}", replace(base, clip=(limit, algorithm), precision="bf16-true"))
    for stage, pattern in product(STAGES, ("several", "unused", "shared_forward", "leaf_hook", "direct")):
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
    for pattern in ("several", "unused"):
        add("hpz", Cell(3, pattern, zero={"zero_hpz_partition_size": 2}))
    for stage in (1, 2, 3):
        add("across_steps", Cell(stage, "unused", across=2, offload="cpu"))
        add("clip_value", Cell(stage, "several", clip=(0.01, "value"), offload="cpu"))
    _add_windows(add)
    _add_several_optimizers(add)
    add("fp32_accumulation", Cell(1, "unused", precision="bf16-true", grad_accum_dtype="fp32", reduction="backward"))
    return cells


def _add_windows(add: Callable[[str, Cell], None]) -> None:
    for stage, pattern in product((2, 3), PATTERNS):
        add("", Cell(stage, pattern, reduction="step"))
    for stage, pattern, window in product((1, 2, 3), PATTERNS, ("all", "backwards")):
        # At stage 1 the step would reduce in any case.
        add(f"window_{window}", Cell(stage, pattern, window=window, reduction="backward"))
    for stage, pattern, window in product(STAGES, (*CORE, "nested"), ("budget", "no_sync")):
        add(f"window_{window}", Cell(stage, pattern, window=window, reduction="backward"))
    for stage, pattern in product((0, 2, 3), CORE):
        add("window_all", Cell(stage, pattern, window="all", precision="bf16-true"))
    for stage, pattern in product(STAGES, ("several", "unused")):
        base = Cell(stage, pattern, precision="bf16-true", accumulate_dtype="float32", window="all")
        add("accumulate_fp32", base)
        add("accumulate_fp32_no_window", replace(base, window=None))
        add("accumulate_fp32_budget", replace(base, window="budget", reduction="backward"))
        add("accumulate_fp32_backwards", replace(base, window="backwards", reduction="backward"))
        add("accumulate_fp32_bf16_wire", replace(base, communication="bf16"))
    for stage, pattern in product(STAGES, ("several", "unused")):
        add("window_all", Cell(stage, pattern, window="all", precision="16-true", reduction="backward"))
        add("window_all-across_steps", Cell(stage, pattern, window="all", reduction="backward", across=2))
    for stage, window in product((2, 3), ("all", "backwards", "budget")):
        base = Cell(stage, "several", window=window, reduction="backward")
        add(f"window_{window}-clip_norm", replace(base, clip=(0.05, "norm")))
        add(f"window_{window}-before", replace(base, zero_grad="before"))
        add(f"window_{window}-adamw", replace(base, optimizer="adamw"))
    for stage, window in product((1, 2, 3), ("all", "backwards", "budget")):
        base = Cell(stage, "unused", window=window, reduction="backward")
        add(f"window_{window}-overlap", replace(base, zero={"overlap_comm": True}))
        add(f"window_{window}-not_contiguous", replace(base, zero={"contiguous_gradients": False}))
        add(f"window_{window}-all_reduce", replace(base, zero={"reduce_scatter": False}))
        add(f"window_{window}-one_bucket", replace(base, zero={"reduce_bucket_size": 100_000}))
        add(f"window_{window}-round_robin", replace(base, zero={"round_robin_gradients": True}))
        add(f"window_{window}", replace(base, offload="cpu"))
        add(f"window_{window}", replace(base, offload="cpu", precision="bf16-true", accumulate_dtype="float32"))
    for stage in (2, 3):
        base = Cell(stage, "several", reduction="step")
        add("across_steps", replace(base, across=2))
        add("discard", replace(base, zero_grad="discard"))
        add("automatic", replace(base, pattern="leaf_hook", automatic=True))
        for pattern in ("single", "unused", "leaf_hook"):
            add("accumulate", replace(base, pattern=pattern, automatic=True, across=4))
            add("accumulate", replace(base, pattern=pattern, automatic=True, across=4, offload="cpu"))
            add("accumulate", replace(base, pattern=pattern, automatic=True, across=4, precision="bf16-true"))
    for stage, buffers in product((1, 2), (3, 8)):
        add(f"buffers_{buffers}", Cell(stage, "unused", zero={"overlap_comm": True}, bucket_buffers=buffers))
    # Parameters that are never partitioned.
    for window in ("all", "backwards", "budget"):
        persistent = {"stage3_param_persistence_threshold": 100}
        add(f"window_{window}-persistent", Cell(3, "unused", window=window, zero=persistent))


def _add_several_optimizers(add: Callable[[str, Cell], None]) -> None:
    for stage, pattern, count in product(STAGES, PATTERNS, (2, 3)):
        add(f"{count}_optimizers", Cell(stage, pattern, optimizers=count))
    for stage in STAGES:
        base = Cell(stage, "several", optimizers=2)
        for pattern in ("unused", "nested"):
            add("2_optimizers", replace(base, pattern=pattern, optimizer="adamw"))
        add("2_optimizers", replace(base, precision="bf16-true"))
        add("2_optimizers", replace(base, precision="16-true"))
        # With 0.05 a rounding decides on which side of a ReLU's kink a value is.
        add("2_optimizers-clip_norm", replace(base, clip=(0.04, "norm")))
        add("2_optimizers-clip_value", replace(base, clip=(0.01, "value")))
        add("2_optimizers-across_steps", replace(base, across=2))
        add("2_optimizers-discard", replace(base, zero_grad="discard"))
        add("2_optimizers-window_all", replace(base, window="all", reduction="backward"))
        if stage:
            add("2_optimizers", replace(base, reduction="step"))
            add("2_optimizers", replace(base, offload="cpu"))


CELLS = _cells()


def _thorough(cell: Cell) -> bool:
    """Cells that repeat what others show, in one more combination: a quarter of them with ``--thorough``."""
    if cell.zero or cell.offload:
        return cell.pattern not in ("several", "unused") or cell.window in ("backwards", "budget")
    if cell.optimizers > 1:
        return cell.optimizers == 3 or cell.pattern not in ("several", "unused")
    if cell.precision != "32-true" and (cell.window not in (None, "all") or cell.pattern == "leaf_hook"):
        return True
    if cell.pattern in ("several", "unused", "leaf_hook"):
        return False
    special = cell.precision != "32-true" or cell.window not in (None, "all") or cell.optimizer != "sgd"
    # In a window, stages 0 and 1 do what they do without one.
    return special or cell.reduction != "auto" and cell.stage < 2


def _marks(name: str, cell: Cell) -> list[pytest.MarkDecorator]:
    if not _thorough(cell):
        return []
    return [pytest.mark.every_cell if turn(name) % 4 else pytest.mark.thorough]


def check(cell: Cell, outcomes: list[Any]) -> None:
    """Assert that every rank's outcome is within the stated bounds."""
    for outcome in outcomes:
        assert outcome.error <= BOUNDS[cell.kind], outcome
        assert outcome.norm_error <= BOUNDS[cell.kind], outcome
        assert not outcome.frozen, outcome
        if cell.kind == "32" and cell.optimizer == "sgd" and cell.clip is None:
            assert outcome.first_step_exact, outcome


@pytest.mark.sampled(every=6)
@pytest.mark.matrix
@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name, cell)) for name, cell in CELLS.items()])
def test_cell(ranks2: Any, name: str) -> None:
    check(CELLS[name], ranks2.run(run_cell, CELLS[name]))


#: One in so many cells in fp32: thirty. An odd number of ranks cuts every partition elsewhere.
_ON_THREE_RANKS = [name for name, cell in CELLS.items() if cell.kind == "32"]
_ON_THREE_RANKS = _ON_THREE_RANKS[:: len(_ON_THREE_RANKS) // 30]


@pytest.mark.thorough
@pytest.mark.parametrize("name", _ON_THREE_RANKS)
def test_cell_on_three_ranks(ranks: Callable[[int], Any], name: str) -> None:
    for outcome in ranks(3).run(run_cell, CELLS[name]):
        assert max(outcome.error, outcome.norm_error) <= BOUNDS["32"], outcome
        assert not outcome.frozen, outcome


def test_enough_cells() -> None:
    assert len(_ON_THREE_RANKS) >= 30
    assert sum(not _thorough(cell) for cell in CELLS.values()) >= 300
    assert sum(cell.window is not None or cell.reduction == "step" for cell in CELLS.values()) >= 200
