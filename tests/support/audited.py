"""Fits with a GradientAudit, on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_zeroplus.callbacks.gradient_audit import GradientAudit
from tests.matrix.cells import Cell, Loop, strategy_for, trainer_for
from tests.support.patterns import batches


class Audit(NamedTuple):
    """What an audited fit has given on one rank."""

    #: Name, backwards, error, tolerance, passed and dtypes of every parameter in every audited step.
    results: list[Any]
    steps: int
    #: The message of the ``GradientMismatchError``, if one was raised.
    error: str | None

    @property
    def worst(self) -> float:
        return max(result.error for result in self.results)


class Audited(Loop):
    """A loop of the gradient matrix that is audited, and does not look at the weights."""

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def ddp(cell: Cell) -> str:
    """DDP, which the promise is measured by."""
    return "ddp_find_unused_parameters_true"


def audit(
    cell: Cell,
    make_strategy: Callable[[Cell], Any] = strategy_for,
    mutation: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **arguments: Any,
) -> Audit:
    """Fit three steps under an audit."""
    data = batches(cell.batch_count, dist.get_world_size())
    auditor = GradientAudit(**arguments)
    error = None
    run = trainer_for(cell, make_strategy, callbacks=[auditor])
    with mutation():
        try:
            run.fit(Audited(cell), DataLoader([ranks[dist.get_rank()] for ranks in data], batch_size=None))
        except RuntimeError as raised:
            if type(raised).__name__ != "GradientMismatchError":
                raise
            error = str(raised)
    return Audit([result._replace() for result in auditor.results], auditor.audited_steps, error)
