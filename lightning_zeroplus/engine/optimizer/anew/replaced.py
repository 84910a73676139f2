"""Other optimizers take the place of an engine's in the middle of a fit, as ``trainer.optimizers = [...]`` asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_zeroplus.engine.families.zeroes import ROUTE
from lightning_zeroplus.engine.optimizer.anew.exchange import Exchange, refuse_now
from lightning_zeroplus.engine.optimizer.anew.marks import mark_of, torch_optimizer_of
from lightning_zeroplus.engine.optimizer.groups import unwrapped


def come_back(optimizer: Any) -> Any:
    """Let an optimizer that was replaced be one of the engine's again, beside the others; a collective.

    Args:
        optimizer: What the user has of it.

    Returns:
        What takes its place; ``optimizer`` if it was not replaced.
    """
    found = torch_optimizer_of(optimizer)
    mark = mark_of(found)
    if mark is None:
        return optimizer
    return replace(mark.engine, [*mark.engine.shown_optimizers(), found])[-1]


def was_replaced(optimizer: Any) -> bool:
    """Whether others have replaced an optimizer of an engine."""
    return mark_of(torch_optimizer_of(optimizer)) is not None


def stepped(optimizer: Any) -> Any:
    """What steps, and is clipped, in place of an optimizer of an engine, or of a wrapper of one.

    Raises:
        RuntimeError: If no engine has it.
    """
    found = come_back(optimizer)
    if hasattr(found, "gradient_accumulation"):
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


def replace(engine: Any, optimizers: Sequence[Any], what: str = "`trainer.optimizers = ...`") -> list[Any]:
    """Let other optimizers update the parameters of an engine; a collective.

    Those that the engine has already keep their states. Others are torch optimizers. One that the engine had before
    has its states again.

    Args:
        engine: A :class:`~lightning_zeroplus.engine.engine.ZeroPlusEngine`.
        optimizers: All that the user will step.
        what: What the user has called, for messages.

    Returns:
        What the user steps, in the order of ``optimizers``.

    Raises:
        ValueError: If one has a parameter that came into the module during the fit; nothing was changed.
        RuntimeError: Within a window or a step, or if the engine is compiled; nothing was changed.
    """
    refuse_now(engine, what, "Make all optimizers")
    if engine.stepping:
        raise RuntimeError(f"{what} within an optimizer step: exchange optimizers between two steps.")
    exchange = Exchange(engine, optimizers)
    engine.meet()  # forwards may have run since the last backward
    return exchange.run()
