"""The matrix can fail: what upstream gets silently wrong, its cells see. Each failure here is one that is fixed."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_zeroplus.testing import RankError
from tests.matrix.cells import Cell, run_cell
from tests.support.upstream import lightnings_strategy, ours_without_accumulation, unmanaged_strategy

UPSTREAM = {"lightning": lightnings_strategy, "switched_off": ours_without_accumulation}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("strategy", UPSTREAM)
def test_several_backwards_in_a_step_lose_gradients(ranks2: Any, strategy: str, stage: int) -> None:
    """Finding 1. One backward is right, four are wrong, and nothing is raised."""
    make = UPSTREAM[strategy]
    for outcome in ranks2.run(run_cell, Cell(stage, "single"), make):
        assert outcome.error < 1e-5
    for outcome in ranks2.run(run_cell, Cell(stage, "several"), make):
        assert outcome.error > 0.5


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_setting_of_deepspeed_repairs_several_backwards_but_at_stage_3(ranks2: Any, stage: int) -> None:
    """``managed_gradient_accumulation: false``, which Lightning does not set."""
    for outcome in ranks2.run(run_cell, Cell(stage, "single"), unmanaged_strategy):
        assert outcome.error < 1e-5
    for outcome in ranks2.run(run_cell, Cell(stage, "several"), unmanaged_strategy):
        assert outcome.error > 0.5 if stage == 3 else outcome.error < 1e-5


@pytest.mark.parametrize(("stage", "offload"), [(2, "cpu"), (3, None), (3, "cpu")])
def test_a_parameter_without_gradient_is_updated_with_an_old_one(ranks2: Any, stage: int, offload: str | None) -> None:
    """``late`` gets a gradient in the second step only; upstream's partition keeps it for the third."""
    cell = Cell(stage, "late_once", offload=offload)
    for outcome in ranks2.run(run_cell, cell, ours_without_accumulation):
        assert outcome.error > 0.1
    for outcome in ranks2.run(run_cell, cell):
        assert outcome.error < 1e-5


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_manual_clipping_is_ignored(ranks2: Any, stage: int) -> None:
    for outcome in ranks2.run(run_cell, Cell(stage, "single", clip=(0.05, "norm")), lightnings_strategy):
        assert outcome.error > 0.5


@pytest.mark.parametrize(
    ("stage", "pattern", "message"),
    [
        (2, "nested", "already been reduced"),
        (2, "leaf_hook", "loss must be a scalar tensor"),
        (3, "same_loss_twice", "matrix|size|shape"),
        (2, "idle", "index out of range"),
    ],
)
def test_other_loops_fail(ranks2: Any, stage: int, pattern: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        ranks2.run(run_cell, Cell(stage, pattern), lightnings_strategy)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_incomplete_accumulation_window_is_not_stepped(ranks2: Any, stage: int) -> None:
    """Lightning steps at the end of an epoch; DeepSpeed counts on into the next."""
    cell = Cell(stage, "single", automatic=True, across=4)
    for outcome in ranks2.run(run_cell, cell, lightnings_strategy):
        assert outcome.error > 0.1


def test_stage_0_fp16_divides_by_a_scale_it_never_applied(ranks2: Any) -> None:
    for outcome in ranks2.run(run_cell, Cell(0, "single", precision="16-true"), ours_without_accumulation):
        assert outcome.error > 0.9
