"""``trainer.optimizers = [...]`` during a fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer


def replaced(
    engine: Any, wrappers: Sequence[Any], optimizers: Sequence[Any], check: Callable[[Any], None]
) -> list[Any]:
    """Let the engine train with ``optimizers``; a collective if it has not all of them.

    Args:
        engine: A :class:`~lightning_zeroplus.engine.engine.ZeroPlusEngine`.
        wrappers: The Trainer's wrappers of the engine's optimizers, which the user may have kept.
        optimizers: What was assigned.
        check: Refuses a torch optimizer that the engine cannot step.

    Returns:
        What the user steps, in the order of ``optimizers``.

    Raises:
        ValueError: See :meth:`.ExchangesOptimizers.replace_optimizers`, and so are the others.
        RuntimeError: See there.
    """
    from lightning_zeroplus.engine.optimizer.anew.exchange import number_of
    from lightning_zeroplus.engine.optimizer.anew.marks import was_replaced

    numbers = [number_of(engine, each) for each in optimizers]
    if None not in numbers:
        shown = engine.shown_optimizers()
        return [
            each if hasattr(each, "gradient_accumulation") else shown[number]
            for each, number in zip(optimizers, numbers, strict=True)
        ]
    for each, number in zip(optimizers, numbers, strict=True):
        if number is None and not was_replaced(each):
            check(each)
    wrapped = [number_of(engine, wrapper) for wrapper in wrappers]
    made = engine.replace_optimizers(optimizers)
    for wrapper, number in zip(wrappers, wrapped, strict=True):
        if number is not None and number in numbers:
            wrapper._optimizer = made[numbers.index(number)]
        cls = type(wrapper._optimizer)
        wrapper.__class__ = type(f"Lightning{cls.__name__}", (LightningOptimizer, cls), {})
    return made
