"""Where all ranks come together outside of a backward: at stage 3, one that still gathers weights is served there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_zeroplus.gradients.patches.specialize import generalize, specialize
from lightning_zeroplus.strategy.common.signals import ActsOnSignals, noted

if TYPE_CHECKING:
    import lightning.pytorch as pl


# The hooks that run between a backward and the step.
_BEFORE_STEPS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")


class _MeetsBetweenBatches:
    """Mixin for Lightning's loop over batches, which begins each of them with a collective of its own."""

    def _broadcast_sigterm_tensor(self: Any) -> None:
        """Agree on signals, if any rank has received one: the ranks tell each other when they meet."""
        if not self.trainer.strategy.none_noted(noted(self.trainer)):
            super()._broadcast_sigterm_tensor()  # type: ignore[misc]


@contextmanager
def meeting_between_batches(trainer: pl.Trainer) -> Iterator[None]:
    """Within: the ranks meet before each batch."""
    loop = trainer.fit_loop.epoch_loop
    if isinstance(loop, _MeetsBetweenBatches) or not hasattr(loop, "_broadcast_sigterm_tensor"):
        yield  # a fit within a fit, such as a tuner's, has it already
        return
    specialize(loop, _MeetsBetweenBatches)
    try:
        yield
    finally:
        generalize(loop, _MeetsBetweenBatches)


class MeetsOthers(ActsOnSignals):
    """Mixin for a strategy whose ranks may run different modules.

    One rank may run a module that the others do not run. They take part in its gathers where all ranks come together:
    here, and before each collective (:mod:`lightning_zeroplus.gradients.ranks.own_collectives`).
    """

    def _meeting(self) -> Any:
        """Who knows what the ranks do together, while they train: an engine, for one."""
        return self.model

    def end_reading(self) -> None:
        """Release weights that a user's code has needed since the last batch, outside of their modules."""

    @override
    def none_noted(self, signals: int) -> bool:
        self.end_reading()
        return self._meet(signals) and not signals

    def _meet(self, number: int = 0) -> bool:
        """Whether all ranks came here in the same way, and with the same number, which each is told then."""
        meet = getattr(self._meeting(), "meet", None)
        return meet is not None and meet(number)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        meeting, module = self._meeting(), self.lightning_module
        if hasattr(meeting, "meets_before_steps") and module is not None:
            users: list[tuple[Any, type]] = [(module, LightningModule)]
            users += [(callback, Callback) for callback in module.trainer.callbacks]  # type: ignore[attr-defined]
            # A round costs a small CPU step 3 % of its time.
            meeting.meets_before_steps = not module.automatic_optimization or any(
                is_overridden(hook, *user) for hook in _BEFORE_STEPS for user in users
            )

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().validation_step(*args, **kwargs)
        self._meet()
        return result
