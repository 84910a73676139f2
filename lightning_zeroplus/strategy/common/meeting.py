"""Where all ranks come together outside of a backward: at stage 3, one that still gathers weights is served there.

They do before each batch, and tell each other their signals. In a window of Lightning's ``accumulate_grad_batches`` a
micro-batch may need no other rank. With small ones that collective is then a good part of the time, and on a GPU the
host waits for it. So most of them are left out there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_zeroplus.gradients.patches.specialize import generalize, specialize
from lightning_zeroplus.strategy.common.signals import ActsOnSignals, noted

if TYPE_CHECKING:
    import lightning.pytorch as pl


#: Seconds by which a signal may be acted on later, if batches go on taking as long as before.
_DELAY = 1.0
#: Fewer than this are not left out: to agree on it costs as much as one of them.
_WORTHWHILE = 3
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


class _Pause:
    """How many micro-batches begin without a collective. All ranks know the same.

    The first one of a window always has it: the ranks agree on hooks, which may see what was averaged before.

    Args:
        trainer: The Trainer, which fits.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._left, self._batches, self._since = 0, 0, time.monotonic()
        self._is_refused = False

    def goes_on(self) -> bool:
        """Before a batch: whether the ranks do without the collective."""
        self._batches += 1
        if self._left and self._position():
            self._left -= 1
            return True
        return False

    def begin(self) -> None:
        """After the collective: agree on how many are left out next."""
        position = self._position()
        if self._left or not position or (self._is_refused and position & (position - 1)):
            return  # where it was refused, it is asked again at 1, 2, 4, 8 …
        now = time.monotonic()
        seconds = max(now - self._since, 1e-9) / self._batches
        self._batches, self._since = 0, now
        strategy: Any = self._trainer.strategy
        wanted = int(_DELAY / seconds) if strategy.is_alone_in_windows() else 0
        agreed = torch.tensor(wanted if wanted >= _WORTHWHILE else 0, device=strategy.root_device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        self._left = int(agreed)
        self._is_refused = not self._left

    def _position(self) -> int:
        """This batch's place in its window."""
        return self._trainer.fit_loop.epoch_loop.batch_progress.current.ready % self._trainer.accumulate_grad_batches


class _Pauses:
    """Mixin for Lightning's loop over batches."""

    pause: _Pause

    def _broadcast_sigterm_tensor(self: Any) -> None:
        if not self.pause.goes_on():
            super()._broadcast_sigterm_tensor()  # type: ignore[misc]
            self.pause.begin()


@contextmanager
def pausing_in_windows(trainer: pl.Trainer) -> Iterator[None]:
    """Within: most micro-batches that need no other rank begin without the collective that begins a batch."""
    loop: Any = trainer.fit_loop.epoch_loop
    if isinstance(loop, _Pauses) or not hasattr(loop, "_broadcast_sigterm_tensor"):
        yield
        return
    specialize(loop, _Pauses)
    loop.pause = _Pause(trainer)
    try:
        yield
    finally:
        generalize(loop, _Pauses)
        del loop.pause


class MeetsOthers(ActsOnSignals):
    """Mixin for a strategy whose ranks may run different modules.

    One rank may run a module that the others do not run. They take part in its gathers where all ranks come together:
    here, and before each collective (:mod:`lightning_zeroplus.gradients.ranks.own_collectives`).
    """

    def _meeting(self) -> Any:
        """Who knows what the ranks do together, while they train: an engine, for one."""
        return self.model

    def is_alone_in_windows(self) -> bool:
        """Whether no further micro-batch of this window needs another rank, but the reduction after the last one."""
        return False

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
