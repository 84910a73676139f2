"""When FSDP2 reduces: the engine's side of a window, and what step, zero_grad and clipping mean between reductions."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from lightning_zeroplus.fsdp.in_step import UnitsInStep
from lightning_zeroplus.fsdp.units import Unit, Units
from lightning_zeroplus.fsdp.whole.layout import as_stored
from lightning_zeroplus.gradients.tasks import at_end_of_backward, current_task, reaches
from lightning_zeroplus.gradients.window_report import WindowReport
from lightning_zeroplus.strategy.common.window import GradientWindow
from lightning_zeroplus.weight_grads.store import WeightGradStore


class ShardedGradients:
    """The gradients of FSDP2 units between two optimizer steps; a :class:`~.window.Reducer`.

    Args:
        units: The units of the LightningModule.
        store: The deferred weight gradients.
        window: Asked before a step and a ``zero_grad()``.
        until_step: Hold everything until the step (``reduction="step"`` in manual optimization).

    Attributes:
        withheld: Some backward since the last reduction may have left unreduced gradients. The same on all ranks,
            because it follows from the program, or from what they have told each other.
        in_step: What the ranks gather and reduce together.
        several: There are several optimizers, which may take turns in what requires a gradient.
        meets_before_steps: A rank may run modules between its last backward and a step, which the others do not.
    """

    meets_before_steps = False

    def __init__(
        self, units: Units, store: WeightGradStore, window: GradientWindow[WindowReport], until_step: bool
    ) -> None:
        self.units = units
        self.store = store
        self._window = window
        self._until_step = until_step
        self._blocked = 0
        self.withheld = False
        self.in_step = UnitsInStep(units.groups(), units.device)
        self.in_step.meet_before_collectives(self._meet_at_collective)
        self._stale = False
        self.several = False
        self._is_ending = False  # somebody ends the backward that runs
        store.on_put = self._put
        self._rest()

    def _rest(self) -> None:
        """What holds outside of windows and ``no_sync()``."""
        sync = not self._until_step and not self._blocked
        self.units.set_sync(sync)
        self.withheld = self.withheld or not sync

    # -- windows --------------------------------------------------------------------------------------------------

    def open_window(self, max_bytes: int | None) -> WindowReport:
        """Do not reduce the units that fit into ``max_bytes`` until :meth:`close_window`: in the module's order."""
        sizes = {unit: unit.grad_bytes for unit in self.units.all}
        chosen, used = list[Unit](), 0
        for unit, size in sizes.items():
            if max_bytes is None or used + size <= max_bytes:
                chosen.append(unit)
                used += size
        self.units.set_sync(False, chosen)
        self.withheld = True
        count = {unit: len(unit.trainable) for unit in sizes}
        return WindowReport(sum(count[unit] for unit in chosen), used, sum(count.values()), sum(sizes.values()))

    def reduce_next_backward(self) -> None:
        """Let the next backward reduce, each unit as soon as its gradients are complete."""
        self.units.set_sync(True)

    def close_window(self, reduce: bool) -> None:
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
        self.in_step.end()  # another rank may still run modules
        self._reduce()

    def _reduce(self) -> None:
        self.in_step.is_reducing = True
        try:
            self.store.flush()
            self.units.reduce()
        finally:
            self.in_step.is_reducing = False
        self.units.agree()
        self.withheld = self._stale = False
        self._rest()

    def meet(self, number: int = 0, has_late: bool = False) -> bool:
        """All ranks come here, each after forwards and backwards of its own.

        Args:
            number: That this rank brings along.
            has_late: This rank has gradients that came to a unit after its reduction.

        Returns:
            Whether all had done the same before, and brought the same number. If not, or if there are late gradients,
            what they have not reduced together is reduced now, or with the rest of the window.
        """
        if current_task() == -1:
            self._is_ending = False  # a backward may have raised
        alike = self.in_step.end(2 * number + has_late)
        if has_late or not alike:
            self.withheld = self._stale = True
            if not self._window.is_open and not self._defers_all:
                self._reduce()
        return alike

    def _meet_at_collective(self) -> None:
        if not self.in_step.is_reducing:
            self.meet()

    @property
    def _defers_all(self) -> bool:
        """Whether backwards only accumulate: the ranks need not run equally many of them."""
        return not any(unit.syncs for unit in self.units.all)

    @contextmanager
    def backward(self) -> Generator[None, None, None]:
        """Around a backward, whose end all ranks come to."""
        self._is_ending = True
        try:
            yield
        finally:
            self._is_ending = False
        self._end_backward()

    def _end_backward(self) -> None:
        if not self._defers_all:
            reducing = [param for unit in self.units.all if unit.syncs for param in unit.params]
            self.meet(has_late=self.units.have_late() or self.store.waits_for(reducing))
            self.units.agree()

    def changed(self, params: Iterable[torch.Tensor]) -> None:
        """A backward has reached a unit, which has these parameters."""
        self._stale = True
        if current_task() != -1 and any(reaches(param) for param in params if param.requires_grad):
            self._await_end()

    def _put(self) -> None:
        """A weight gradient was left in the store; perhaps nothing else tells that there is a backward."""
        self._stale = True
        if current_task() != -1:
            self._await_end()

    def _await_end(self) -> None:
        if not self._is_ending:
            self._is_ending = True  # the user's own `loss.backward()`
            self._window.before_backward()
            self._queue_end()

    def _queue_end(self) -> None:
        at_end_of_backward(self._end_of_task)

    def _end_of_task(self) -> None:
        states: list[Any] = [fully_shard.state(root) for root in self.units.roots]  # type: ignore[attr-defined]
        if any(state._state_ctx.post_backward_final_callback_queued for state in states):
            self._queue_end()  # after FSDP2's own
            return
        try:
            self._end_backward()
        finally:
            self._is_ending = False

    def is_left(self, is_reached: bool) -> bool:
        """Whether a unit's gradients are left for :meth:`reduce`; the same on all ranks for units that all reach."""
        return self.withheld and not is_reached and not self.in_step.is_reducing

    def before_access(self) -> None:
        """Reduce, so that whoever reads ``param.grad`` gets what the optimizer would use.

        Raises:
            RuntimeError: In a window or in ``no_sync()``, if there has been a backward.
        """
        if self.in_step.is_reducing or not (self._stale and self.withheld):
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
        if self.withheld:
            self.reduce()
        elif self.meets_before_steps:
            self.meet()
        self.store.check_empty()
        self.units.check_reduced()

    def zero_grad(self, set_to_none: bool = True, params: Iterable[torch.Tensor] | None = None) -> None:
        """Forget what is not reduced, which ``optimizer.zero_grad()`` does not see.

        Args:
            set_to_none: False: what has a gradient has one of zero.
            params: Of these sharded parameters; None: of all.
        """
        by_unit = self.units.unsharded(params)
        chosen = [param for each in by_unit.values() for param in each]
        with as_stored():
            held = any(param.grad is not None for param in chosen)
        self._window.before_zero_grad(held or len(self.store) > 0)
        self.store.clear(None if params is None else chosen)
        for unit, each in by_unit.items():
            unit.zero(each, set_to_none)
        trainable = sum(len(unit.trainable) for unit in by_unit)
        has_all = params is None or (not self.several and sum(p.requires_grad for p in chosen) == trainable)
        if set_to_none and has_all:
            self._stale = False

    def close(self) -> None:
        """End what this does for the store, which may be the user's, and with the other ranks."""
        self.store.on_put = None
        self.in_step.close()

    def recover(self) -> None:
        """After an exception: drop every gradient since the last step, without a collective."""
        self.store.clear()
        self.units.reset()
        self.units.drop()
        self.in_step.begin_anew()
        self._stale = False


class RoutedZeroGrad(Optimizer):
    """Mixin of the optimizer: ``zero_grad()`` also drops unreduced gradients."""

    sharded_gradients: ShardedGradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this optimizer's parameters, reduced or not."""
        params = [param for group in self.param_groups for param in group["params"]]
        self.sharded_gradients.zero_grad(set_to_none, params)
        with as_stored():  # those of other optimizers may still wait
            super().zero_grad(set_to_none)


class ReducesBeforeClipping:
    """Mixin of the precision plugin: what is clipped is the reduced gradient, also before the step."""

    sharded_gradients: ShardedGradients

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Reduce, then clip."""
        self.sharded_gradients.complete("clip_gradients()")
        super().clip_gradients(*args, **kwargs)  # type: ignore[misc]
