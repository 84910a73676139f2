"""Jobs of two processes in which one rank meets a fault: all end, the user sees why, nothing is left behind.

By default some kinds of fault are met once, and every stage. ``--thorough`` meets every kind, and some at other stages;
``--every-cell`` runs the whole product. ``benchmarks/faults.py`` writes it as the table in docs/faults.md.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.jobs import FAULTS, LIMIT_S, run_job
from tests.support.training import Classifier, fit, zero_plus
from tests.support.turns import turn

#: The stage at which each fault is met by default; faults that are not here only in the product.
DEFAULT: dict[str, Any] = {
    "forward, rank 0": 3,
    "window": 2,
    "step": 1,
    "save": 3,
    "disk full": 1,
    "killed": 0,
    "killed, rank 0": 2,
    "raises, others busy, rank 0": 1,
    "killed, others busy": 2,
    "stopped": 1,
    "stopped, rank 0": 0,
    "uneven": 2,
    "backward": "fsdp",
    "interrupted": 3,
    "uneven, no length": 0,
}
#: They end when a time limit does.
WAIT = ("stopped", "stopped, rank 0", "uneven, no length")
STAGES = (0, 1, 2, 3, "fsdp")


def _marks(fault: str, stage: int | str) -> list[pytest.MarkDecorator]:
    if DEFAULT.get(fault) == stage:
        return [pytest.mark.slow] * (fault in WAIT)
    return [pytest.mark.every_cell if turn(f"{fault} {stage}") % 8 else pytest.mark.thorough]


_PRODUCT = [pytest.param(fault, stage, marks=_marks(fault, stage)) for fault, stage in product(FAULTS, STAGES)]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(("name", "stage"), _PRODUCT)
def test_all_ranks_end_and_the_first_error_is_shown(name: str, stage: int | str, tmp_path: Path, ranks2: Any) -> None:
    fault = FAULTS[name]
    outcome = run_job(name, stage, tmp_path)
    assert not outcome.left, outcome.output
    assert outcome.seconds <= (fault.timeout or 0) + LIMIT_S / 2, outcome.output
    assert outcome.status == fault.status, outcome.output
    assert outcome.first_error_shown(fault), outcome.output
    if name in ("save", "disk full") and stage != "fsdp":
        whole, half = (tmp_path / f"step={step}.ckpt" for step in (2, 4))
        ranks2.run(_resume, stage, str(whole))
        assert not half.exists()


class _Resumed(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A checkpoint knows its optimizer's class by name.
        return type("_FaultySGD", (torch.optim.SGD,), {})(self.parameters(), 0.05, momentum=0.9)


def _resume(stage: int, path: str) -> None:
    fit(zero_plus(stage), _Resumed(scheduler=None), ckpt_path=path, max_epochs=1)
