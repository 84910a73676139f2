"""When FSDP2 reduces: the reducer of windows, and step, zero_grad and clipping with unreduced gradients."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from lightning_zeroplus.fsdp.in_step import UnitsInStep
from lightning_zeroplus.fsdp.units import Unit, Units
from lightning_zeroplus.fsdp.whole.aliases import AssignedGradient, outside
from lightning_zeroplus.fsdp.whole.layout import as_stored
from lightning_zeroplus.gradients.tasks import at_end_of_backward, current_task, reaches
from lightning_zeroplus.gradients.window_report import WindowReport
from lightning_zeroplus.strategy.common.window import GradientWindow
from lightning_zeroplus.strategy.fsdp2.hooks import HookedParameters
from lightning_zeroplus.weight_grads.store import WeightGradStore


class ShardedGradients:
    """The gradients of FSDP2 units between two optimizer steps; a :class:`~.window.Reducer`.

    Args:
        units: The units of the LightningModule.
        store: The deferred weight gradients.
        window: The window; it refuses steps and ``zero_grad()`` while it is open.
        until_step: Hold all gradients until the step (``reduction="step"`` in manual optimization).

    Attributes:
        withheld: Whether a backward since the last reduction may have left unreduced gradients. The same on all ranks,
            because it follows from the program, or from messages between the ranks.
        in_step: The gathers and reductions that all ranks make together.
        several: Whether there are several optimizers, between which ``requires_grad`` may be toggled.
        hooked: The parameters with hooks that see what was accumulated.
        meets_before_steps: Whether a rank may run modules between its last backward and a step that others do not run.
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
        self._is_intermediate = self.withheld = self.evaluates = False
        self.in_step = UnitsInStep(units.groups(), units.device)
        self.in_step.meet_before_collectives(self._meet_at_collective)
        self._stale = self.unsynced = self.several = self.follows = False
        self._assigned: list[AssignedGradient] = []
        self._is_read = False  # by the user: gradients may still be there
        self._is_ending = False  # the end of the running backward is taken care of
        self.hooked = HookedParameters()
        store.on_put = self._put
        self._rest()

    def _rest(self) -> None:
        """Set whether units reduce outside of windows."""
        sync = not self._until_step and not self._blocked
        self.units.set_sync(sync)
        if self._is_intermediate and sync:
            self.units.reduce_among_shards()
        self.withheld = self.withheld or not sync or self._is_intermediate

    def _expect(self, another: bool) -> None:
        """Keep whole weights after a backward, if another one follows before the step."""
        for group in self.in_step.groups:
            group.keeps = another

    # -- windows --------------------------------------------------------------------------------------------------

    def open_window(self, max_bytes: int | None) -> WindowReport:
        """Hold back the units that fit into ``max_bytes``, in the module's order, until :meth:`close_window`."""
        sizes = {unit: unit.grad_bytes for unit in self.units.all}
        chosen, used = list[Unit](), 0
        for unit, size in sizes.items():
            if max_bytes is None or used + size <= max_bytes:
                chosen.append(unit)
                used += size
        self.units.set_sync(False, chosen)
        self.units.reduce_among_shards([unit for unit in sizes if unit.syncs])
        self.withheld = True
        self._expect(another=True)
        count = {unit: len(unit.trainable) for unit in sizes}
        return WindowReport(sum(count[unit] for unit in chosen), used, sum(count.values()), sum(sizes.values()))

    def reduce_next_backward(self) -> None:
        """Let backwards reduce again, each unit as soon as its gradients are complete."""
        self.units.set_sync(True)
        self._expect(another=False)

    def close_window(self, reduce: bool) -> None:
        """End a window: reduce what it holds, unless ``until_step``; or drop every gradient since the last step."""
        self._expect(another=False)
        for group in self.in_step.groups:
            group.give_back()
        if not reduce:
            self.recover()
        elif not self._until_step:
            self.reduce()
        self._rest()

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Only accumulate within. The next backward afterwards, or the step, reduces."""
        self._blocked += 1
        self._rest()
        self._expect(another=True)
        try:
            yield
        finally:
            self._blocked -= 1
            self._expect(another=self._blocked > 0)
            self._rest()

    @contextmanager
    def intermediate(self) -> Generator[None, None, None]:
        """Backwards within are not the last before the step: they reduce, but not between replicas.

        The next backward afterwards, or the step, adds up the replicas: one all-reduce for all.
        """
        self._expect(another=True)
        try:
            with self._among_shards() if self.units.have_replicas else nullcontext():
                yield
        finally:
            self._expect(another=False)

    @contextmanager
    def _among_shards(self) -> Generator[None, None, None]:
        self.meet()  # another rank may still take part in reductions of the mode before
        self._is_intermediate = True
        self.in_step.reduce_among_shards(True)
        self._rest()
        try:
            yield
        finally:
            self._is_intermediate = False
            self.in_step.reduce_among_shards(False)
            self._rest()

    # -- the life of a gradient -----------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Compute deferred weight gradients, and reduce all unreduced gradients."""
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
        self.withheld = self._stale = self.unsynced = False
        self._rest()

    def meet(self, number: int = 0, has_late: bool = False) -> bool:
        """Wait for all ranks, and serve ranks that still gather or reduce.

        If the ranks have reduced differently, or have late gradients, the unreduced gradients are reduced now, or
        together with the window.

        Args:
            number: A number to compare between the ranks.
            has_late: Whether this rank has gradients that came to a unit after its reduction.

        Returns:
            Whether all ranks have reduced alike, and passed the same arguments.
        """
        if current_task() == -1:
            self._is_ending = False  # a backward may have raised
        # A rank that has kept its weights in ``no_sync()`` has gathered no more than one that was never in it.
        alike = self.in_step.end(4 * number + 2 * self.withheld + has_late)
        if has_late or not alike:
            self.withheld = self._stale = True
            if not self._window.is_open and not self._defers_all:
                self._reduce()
        return alike

    def _meet_at_collective(self) -> None:
        if not self.in_step.is_reducing:
            self.meet()

    @property
    def _is_held(self) -> bool:
        return self._window.is_open or (self._blocked > 0 and not self.evaluates)

    @property
    def _defers_all(self) -> bool:
        """Whether backwards only accumulate. Then the ranks may run different numbers of them."""
        return not any(unit.syncs for unit in self.units.all)

    @contextmanager
    def backward(self) -> Generator[None, None, None]:
        """Surround a backward, at whose end all ranks meet."""
        self._check_assigned()
        if self.hooked and self._stale and not (self.unsynced or self._blocked or self._window.is_open):
            self.reduce()
            self.follows = False
            if self.hooked.take_averages():
                self.withheld = self._stale = True
        self._is_ending = True
        try:
            yield
        finally:
            self._is_ending = False
        self._end_backward()

    def _end_backward(self) -> None:
        self.unsynced = bool(self._blocked)
        self._is_read = self._is_read and self.units.have_reduced()
        if self._is_read and not (self._window.is_open or self._blocked):
            self.reduce()  # now, because the user may have kept them
        elif not self._defers_all:
            reducing = [param for unit in self.units.all if unit.syncs for param in unit.params]
            self.meet(has_late=self.units.have_late() or self.store.waits_for(reducing))
            self.units.agree()

    def note_hooked(self, link: Any) -> None:
        """A parameter has hooks of the user."""
        self.hooked.note(link)

    def note_assigned(self, assigned: AssignedGradient) -> None:
        """A whole tensor was assigned to ``param.grad``."""
        self._assigned.append(assigned)

    def _check_assigned(self) -> None:
        """A backward begins."""
        self.follows = self._stale and self.withheld and not (self.unsynced or self._window.is_open)
        assigned, self._assigned = self._assigned, []
        for each in assigned:
            each.check_backward()

    def changed(self, params: Iterable[torch.Tensor]) -> None:
        """A backward has reached the unit of these parameters."""
        self._stale, self.withheld = True, self.withheld or self._blocked > 0
        if not self._is_ending and current_task() != -1 and any(reaches(each) for each in params if each.requires_grad):
            self._await_end()

    def _put(self) -> None:
        """The store got a weight gradient. This may be the only sign that a backward runs."""
        self._stale = True
        if current_task() != -1:
            self._await_end()

    def _await_end(self) -> None:
        if not self._is_ending:
            self._check_assigned()
            self.hooked.check_seen()
            self._is_ending = True  # the user's own `loss.backward()`
            self._window.before_backward()
            at_end_of_backward(self._end_of_task)

    def _end_of_task(self) -> None:
        states: list[Any] = [fully_shard.state(root) for root in self.units.roots]  # type: ignore[attr-defined]
        if any(state._state_ctx.post_backward_final_callback_queued for state in states):
            at_end_of_backward(self._end_of_task)  # run after FSDP2's own callback
            return
        try:
            self._end_backward()
        finally:
            self._is_ending = False

    def is_left(self, is_reached: bool) -> bool:
        """Whether a unit's gradients are left for :meth:`reduce`. The same on all ranks for units that all reach."""
        return self.withheld and not is_reached and not self.in_step.is_reducing

    def before_access(self) -> None:
        """Reduce, so that a reader of ``param.grad`` gets the gradient that the optimizer would use.

        Raises:
            RuntimeError: In a window or in ``no_sync()``, if there has been a backward; or if the last one was in
                ``no_sync()``.
        """
        if self.in_step.is_reducing or not (self._stale and self.withheld):
            return
        if self._is_held:
            raise RuntimeError(
                "`param.grad` is not reduced yet inside a coalesce() window or block_backward_sync(). Read or write it"
                " after the window, before optimizer.step()."
            )
        if self.unsynced and dist.get_world_size() > 1:
            raise RuntimeError(
                "`param.grad` was read or written after a backward within block_backward_sync() or an evaluation step:"
                " under DDP it is this rank's own there, and FSDP2 has averages. Do it after a backward outside, or use"
                " `torch.autograd.grad`, or `strategy='zeroplus_stage0'` to `'zeroplus_stage3'`."
            )
        self._is_read = self._until_step
        self.reduce()

    def drop_local(self, param: torch.Tensor, set_to_none: bool) -> bool:
        """Drop this rank's own gradient of a parameter, if it is after ``no_sync()``, where nobody may read it.

        Args:
            param: A sharded parameter.
            set_to_none: False sets the gradient to zero instead.
        """
        has_local = self._stale and self.withheld and self.unsynced and dist.get_world_size() > 1
        if not has_local or self.in_step.is_reducing or self._is_held:
            return False
        self.zero_grad(set_to_none, [param])
        return True

    def complete(self, what: str) -> None:
        """Make the gradients ready for clipping or a step.

        Args:
            what: The operation that follows, for the message.

        Raises:
            RuntimeError: In a window or in ``no_sync()``, before anything is changed; or if gradients came after a
                unit's reduction.
        """
        self._window.before_step()
        outside.settle()
        self._assigned = [each for each in self._assigned if each.is_gradient()]
        for each in self._assigned:
            each.check_step()
        if self._blocked:
            raise RuntimeError(
                f"{what} inside block_backward_sync(): the gradients of this rank are not reduced yet, and the ranks"
                " would diverge. Leave it before the last backward of the step."
            )
        if self.withheld:
            self.reduce()
        elif self.meets_before_steps:
            self.meet()
        self.store.check_empty()
        self.units.check_reduced()

    def zero_grad(self, set_to_none: bool = True, params: Iterable[torch.Tensor] | None = None) -> None:
        """Drop unreduced gradients, which a torch optimizer's ``zero_grad()`` does not see.

        Args:
            set_to_none: False sets existing gradients to zero instead.
            params: The sharded parameters whose gradients are dropped; None: all.

        Raises:
            RuntimeError: In a window that has had a backward, if it would drop gradients; nothing has been changed.
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
        """Detach from the store, which may be the user's, and destroy the process group of ``in_step``."""
        self.store.on_put = None
        self.units.drop_sums()
        self.in_step.close()

    def recover(self) -> None:
        """Drop every gradient since the last step, without a collective. Called after an exception."""
        self.store.clear()
        self.units.reset()
        self.units.drop()
        self.in_step.begin_anew()
        self._stale = self.unsynced = False


class RoutedZeroGrad(Optimizer):
    """Mixin of the optimizer: ``zero_grad()`` also drops unreduced gradients."""

    sharded_gradients: ShardedGradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this optimizer's parameters, reduced or not."""
        params = [param for group in self.param_groups for param in group["params"]]
        self.sharded_gradients.zero_grad(set_to_none, params)
        with as_stored():  # no reduction on access: gradients of other optimizers may still be held back
            super().zero_grad(set_to_none)


class ReducesBeforeClipping:
    """Mixin of the precision plugin: clipping reduces first, so that it works on the averaged gradient."""

    sharded_gradients: ShardedGradients

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Reduce, then clip."""
        self.sharded_gradients.complete("clip_gradients()")
        super().clip_gradients(*args, **kwargs)  # type: ignore[misc]
