"""When FSDP2 reduces: the engine's side of a window, and what step, zero_grad and clipping mean between reductions."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_zeroplus.engine.deferred import Deferred
from lightning_zeroplus.fsdp.store import WeightGradStore
from lightning_zeroplus.fsdp.units import Unit, Units
from lightning_zeroplus.gradients.agreement import RankAgreement
from lightning_zeroplus.strategy.window import GradientWindow


class ShardedGradients:
    """The gradients of FSDP2 units between two optimizer steps; a :class:`~.window.Reducer`.

    Args:
        units: The units of the LightningModule.
        store: The deferred weight gradients.
        window: Asked before a step and a ``zero_grad()``.
        until_step: Hold everything until the step (``reduction="step"`` in manual optimization).

    Attributes:
        withheld: Some backward since the last reduction may have left unreduced gradients. The same on all ranks,
            because it follows from the program and not from which gradients there are.
        agreement: Compares, in every step, what the ranks have gathered and reduced.
    """

    def __init__(
        self, units: Units, store: WeightGradStore, window: GradientWindow[Deferred], until_step: bool
    ) -> None:
        self.units = units
        self.store = store
        self._window = window
        self._until_step = until_step
        self._blocked = 0
        self.withheld = False
        self.agreement = RankAgreement(units.device)
        self._reducing = False
        self._stale = False
        self._rest()

    def _rest(self) -> None:
        """What holds outside of windows and ``no_sync()``."""
        sync = not self._until_step and not self._blocked
        self.units.set_sync(sync)
        self.withheld = self.withheld or not sync

    # -- windows --------------------------------------------------------------------------------------------------

    def hold(self, max_bytes: int | None) -> Deferred:
        """Do not reduce the units that fit into ``max_bytes`` until :meth:`let_go`: in the module's order."""
        sizes = {unit: unit.grad_bytes for unit in self.units.all}
        chosen, used = list[Unit](), 0
        for unit, size in sizes.items():
            if max_bytes is None or used + size <= max_bytes:
                chosen.append(unit)
                used += size
        self.units.set_sync(False, chosen)
        self.withheld = True
        count = {unit: len(unit.trainable) for unit in sizes}
        return Deferred(sum(count[unit] for unit in chosen), used, sum(count.values()), sum(sizes.values()))

    def release(self) -> None:
        """Let the next backward reduce, each unit as soon as its gradients are complete."""
        self.units.set_sync(True)

    def let_go(self, reduce: bool) -> None:
        """End a window: reduce what it holds, unless that can wait for the step; or drop every gradient."""
        if not reduce:
            self.recover()
        elif not self._until_step:
            self.reduce()
        self._rest()

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Only accumulate within; the next backward afterwards, or the step, reduces."""
        self._blocked += 1
        self._rest()
        try:
            yield
        finally:
            self._blocked -= 1
            self._rest()

    # -- the life of a gradient -----------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Compute deferred weight gradients, and reduce everything that is not reduced yet."""
        self._reducing = True
        try:
            self.store.flush()
            self.units.reduce()
        finally:
            self._reducing = False
        self.withheld = self._stale = False
        self._rest()

    def changed(self) -> None:
        """A backward has reached a unit."""
        self._stale = True

    def is_left(self, is_reached: bool) -> bool:
        """Whether a unit's gradients are left for :meth:`reduce`; the same on all ranks for units that all reach."""
        return self.withheld and not is_reached and not self._reducing

    def before_access(self) -> None:
        """Reduce, so that whoever reads ``param.grad`` gets what the optimizer would use.

        Raises:
            RuntimeError: In a window or in ``no_sync()``, if there has been a backward.
        """
        if self._reducing or not (self._stale and self.withheld):
            return
        if self._window.is_open or self._blocked:
            raise RuntimeError(
                "`param.grad` is not reduced yet inside a coalesce() window or block_backward_sync(). Read or write it"
                " after the window, before optimizer.step()."
            )
        self.reduce()

    def complete(self, what: str) -> None:
        """Make the gradients ready to be clipped or stepped with.

        Args:
            what: What is about to happen, for the message.

        Raises:
            RuntimeError: In a window or in ``no_sync()``, and for gradients that came after a unit's reduction;
                nothing has been changed.
        """
        self._window.before_step()
        if self._blocked:
            raise RuntimeError(
                f"{what} inside block_backward_sync(): the gradients of this rank are not reduced yet, and the ranks"
                " would part. Leave it before the last backward of the step."
            )
        self.agreement.start()
        if self.withheld:
            self.reduce()
        self.store.check_empty()
        self.units.check_reduced()
        self.agreement.check()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what is not reduced, which ``optimizer.zero_grad()`` does not see, whatever ``set_to_none`` says."""
        held = self.units.held_bytes() > 0 or len(self.store) > 0
        self._window.before_zero_grad(held)
        self.store.clear()
        if held:
            self.units.drop()
        self._stale = False

    def recover(self) -> None:
        """After an exception: drop every gradient since the last step, without a collective."""
        self.store.clear()
        self.units.reset()
        self.units.drop()
        self._stale = False


class RoutedZeroGrad(Optimizer):
    """Mixin of the optimizer: ``zero_grad()`` also drops unreduced gradients."""

    sharded_gradients: ShardedGradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step."""
        self.sharded_gradients.zero_grad()
        super().zero_grad(set_to_none)


class ReducesBeforeClipping:
    """Mixin of the precision plugin: what is clipped is the reduced gradient, also before the step."""

    sharded_gradients: ShardedGradients

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Reduce, then clip."""
        self.sharded_gradients.complete("clip_gradients()")
        super().clip_gradients(*args, **kwargs)  # type: ignore[misc]
