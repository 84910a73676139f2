"""Which optimizer of an engine steps, where the user has another object in its place."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from lightning_zeroplus.engine.families.zeroes import ROUTE
from lightning_zeroplus.engine.optimizer.anew.marks import come_back
from lightning_zeroplus.engine.optimizer.groups import unwrapped


def stepped(optimizer: Any) -> Any:
    """What steps, and is clipped, in place of an optimizer of an engine, or of a wrapper of one.

    Raises:
        RuntimeError: If no engine has it.
    """
    found = come_back(optimizer)
    if hasattr(found, "gradient_accumulation") or not isinstance(unwrapped(found), Optimizer):  # of an engine
        return found
    find, part = vars(unwrapped(found)).get(ROUTE, (lambda: None, None))
    engine = find()
    if engine is None:
        raise RuntimeError(
            f"This {type(optimizer).__name__} is not one that trains: it was not returned by `configure_optimizers()`,"
            " assigned to `trainer.optimizers`, or set up by Fabric (`model, optimizer = fabric.setup(model,"
            " optimizer)`)."
        )
    return engine.optimizer if part is None else engine.shown_optimizers()[part]
