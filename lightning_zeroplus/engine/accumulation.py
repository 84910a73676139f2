"""What happens to gradients between two optimizer steps: every backward adds, nothing overwrites.

Upstream counts micro-batches to find the accumulation boundary, and decides from that count whether a reduced
gradient is copied over the partition or added to it. A loop with several backwards in one ``training_step`` breaks
the count: stages 1 and 2 take every backward for the boundary, stage 3 copies every time. Here ``step()`` is the
boundary, and "copy or add" is decided per parameter: the first gradient since the last step is copied, later ones
are added, and a parameter that got none has its stale partition zeroed.

One :class:`GradientAccumulation` belongs to one engine; its subclasses know how one family of optimizers stores
gradients (:mod:`.replicated` for stage 0 and ``BF16_Optimizer``, :mod:`.zero12`, :mod:`.zero3`). Gradients that are
not reduced in the backward which made them wait in a :class:`~.local_sums.LocalSums`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zeroplus.engine.families.masters import FollowsModule
from lightning_zeroplus.engine.families.zeroes import RoutedZeroGrad, RoutesTorchOptimizers, ZeroesGradients
from lightning_zeroplus.engine.hooks.of_parameters import ParameterHooks
from lightning_zeroplus.engine.hooks.received import ReceivesGradients
from lightning_zeroplus.engine.hooks.users import RunsUsersHooks
from lightning_zeroplus.engine.keeper import Keeper
from lightning_zeroplus.engine.optimizer.anew.unfrozen import AdoptsUnfrozen
from lightning_zeroplus.engine.optimizer.chain import parts_of
from lightning_zeroplus.engine.optimizer.kept import KeepsUsed
from lightning_zeroplus.engine.optimizer.several import StepsInParts
from lightning_zeroplus.engine.optimizer.shown_states import ShownStates
from lightning_zeroplus.engine.optimizer.split_steps import SplitSteps
from lightning_zeroplus.engine.reduction.branches import ComparesBuckets
from lightning_zeroplus.engine.reduction.held import HoldsGradients
from lightning_zeroplus.engine.reduction.life import Event, Life, Place
from lightning_zeroplus.engine.reduction.local_sums import Guard, LocalSums, Reduction
from lightning_zeroplus.engine.reduction.wire_dtypes import WireDtypes, ask_for_dtypes
from lightning_zeroplus.gradients import loss_scale
from lightning_zeroplus.gradients.dtype import GRAD_DTYPES, expected_grad_dtype
from lightning_zeroplus.gradients.patches.collectives import noting_collectives
from lightning_zeroplus.gradients.patches.specialize import add_base, specialize
from lightning_zeroplus.gradients.shown import ShownGradients
from lightning_zeroplus.gradients.tasks import accumulates, at_end_of_backward, current_task
from lightning_zeroplus.weights.partitioned.access import unwatched

if TYPE_CHECKING:
    from lightning_zeroplus.engine.host import EngineHost


class GradientAccumulation(
    Keeper,
    ZeroesGradients,
    StepsInParts,
    KeepsUsed,
    ReceivesGradients,
    RunsUsersHooks,
    ComparesBuckets,
    AdoptsUnfrozen,
    HoldsGradients,
    FollowsModule,
):
    """The gradients of one engine between two steps.

    Args:
        engine: The engine; its optimizer is ready.
        optimizer: The engine's optimizer, specialized in place with :attr:`mixin`.
        reduction: Whether gradients are reduced in every ``"backward"`` or per ``"step"``. See :meth:`when_to_reduce`.
        accumulate_dtype: The dtype in which local gradients are summed; None: as the optimizer's config says.
        grad_dtypes: By name of the parameter, the dtype that its gradients have; None: that in which they come. For
            the others ``param.grad_dtype`` counts if the user has set it, then ``accumulate_dtype``.

    Attributes:
        local_sums: The gradients that wait on this rank.
        wire_dtypes: The dtypes in which gradients are reduced.
        guard: Asked before a backward, a step and a ``zero_grad()``.
        life: Whether there are gradients, and whether some of them wait for :meth:`reduce`.
        averaged: The parameters that have an averaged gradient for the next step, by index. Others are left alone.
        shown: The whole gradients, while the user looks at ``param.grad``.
    """

    mixin: type = RoutedZeroGrad
    #: Whether a parameter is empty on every rank while nobody uses it (stage 3).
    partitions_parameters = False

    def __init__(
        self,
        engine: EngineHost,
        optimizer: Any,
        reduction: Reduction,
        accumulate_dtype: torch.dtype | None,
        grad_dtypes: Mapping[str, torch.dtype | None],
    ) -> None:
        self.engine = engine
        self.optimizer = specialize(optimizer, self.mixin)
        if not isinstance(optimizer, Optimizer):
            # Schedulers that are made during a fit, by tuners for example, take torch optimizers only.
            add_base(optimizer, Optimizer)
        self.optimizer.gradient_accumulation = self
        self._routes = RoutesTorchOptimizers(engine, self._optimizers_within())
        self.hooks_reduce = self._hooks_reduce()
        self.guard: Guard | None = None
        self.params: list[nn.Parameter] = list(engine.module.parameters())
        self.index = {id(param): index for index, param in enumerate(self.params)}
        self.optimized = frozenset(self.index[id(param)] for param in self._optimized_params())
        self.frozen = self._frozen_params()
        self.reduction = self.when_to_reduce(reduction)
        self.hooks = ParameterHooks(self)
        self.local_sums = LocalSums(self.hooks_reduce, self.reduction == "step", self._sums_in_grads(), self.hooks.wake)
        self.life = Life(self.hooks.wake)
        self.averaged: set[int] = set()
        self._begin_keeping()
        self._clipped_norm: Tensor | None = None
        self._begin_parts()
        self.forget_clips()
        self.unsynced, self.synced = False, frozenset()
        self._members: set[int] = set()
        self._hooked: set[int] = set()
        self._task = self._settled = -1
        self._accumulates = True
        self._begin_comparing()
        self.ends_direct_backward = False
        self._without_hooks: set[int] = set()
        self._noting = ExitStack()
        self._noting.enter_context(noting_collectives())
        self._watch(index for index, param in enumerate(self.params) if param.requires_grad)
        self.wire_dtypes = WireDtypes(engine, self.optimizer, self.params, self.local_sums)
        ask_for_dtypes(engine.module, grad_dtypes, accumulate_dtype or self._storage_dtype())
        self.split_steps = SplitSteps(lambda: self.torch_optimizer, self._stretches)
        self.states = ShownStates(engine)
        self._begin_hooks(())
        with unwatched(self.params):
            self.shown = ShownGradients(self, self.params)

    def _optimizers_within(self) -> dict[int | None, Any]:
        """The user's torch optimizers, by their numbers, but for one that is the engine's own."""
        found = parts_of(self.torch_optimizer)
        numbered: dict[int | None, Any] = dict(enumerate(found)) if len(found) > 1 else {None: found[0]}
        return {number: each for number, each in numbered.items() if each is not self.optimizer}

    @property
    def torch_optimizer(self) -> Any:
        """The torch optimizer within upstream's."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _optimized_params(self) -> Iterable[nn.Parameter]:
        """The parameters that the optimizer updates."""
        raise NotImplementedError

    def _hooks_reduce(self) -> bool:
        """Whether upstream's gradient hooks fill reduction buckets during backward."""
        return False

    def _sums_in_grads(self) -> Mapping[int, nn.Parameter] | None:
        """The parameters whose local sums may lie in ``param.grad``; see :class:`.LocalSums`."""
        return None

    def _storage_dtype(self) -> torch.dtype | None:
        """The dtype in which the optimizer keeps reduced gradients; None: the parameters' dtype."""
        return None

    # -- the life of a gradient, in order ------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Make ready for the gradients of a backward: what was to be clipped in the step is clipped before they come.

        Raises:
            RuntimeError: If gradients were clipped that wait since ``no_sync()``.
        """
        if self.clip is not None or self.clips or self.clipped_unsynced:
            self.clip_before_backward()
        was_held, self.unsynced, self._clips_unsynced = self.unsynced, self.local_sums.holding, False
        if self.guard is not None:
            self.guard.before_backward()
        self.restore_hooks()
        self.shown.put_back()
        self.restore_used()
        self.shown.before_backward()
        self.note_synced(was_held)
        self._take_averages_for_hooks(was_held or self.unsynced)
        self.local_sums.begin_backward()
        # Now, because what receives a gradient may be frozen before it is reduced.
        if len(self._members) < len(self.optimized):
            self._members.update(index for index in self.optimized if self.params[index].requires_grad)
        if not self._members <= self._hooked:
            self._watch(self._members - self._hooked)
        self.check_unfrozen()
        self.note_outside(self.local_sums.holding)

    def _before_accumulate(self, index: int, grad: Tensor | None) -> Tensor | None:
        # A tensor hook: it runs right before autograd adds ``grad``, or what it returns, to ``param.grad``.
        if grad is None:
            return None  # from a graph that needs the parameter, but gives it no gradient
        if not self.params[index].requires_grad:
            return None  # frozen after the forward: autograd drops it
        if self._task != (task := current_task()):
            self._task, self._accumulates = task, accumulates(self.params[index])
            self._missing = self.missing_scale()
            self.local_sums.lay_in_grads()
        if not self._accumulates:
            return None  # torch.autograd.grad() returns it
        is_in_flight = self.life.one_goes_on(Event.COMES, index) is Place.IN_FLIGHT
        if not self.engine._running_engine_backward:
            self._queue_direct_backward_end()
        if self.shown.whole is not None:  # shown at the end of a backward within this one
            self.shown.put_back()
            self.shown.before_backward()
        if is_in_flight:
            # param.grad is a view of a reduction bucket: adding to it now would count the first gradient twice.
            self.flush()
            # Backwards nest in this loop: one reduction per step is possible only if all of them wait.
            self.local_sums.until_step = self.reduction == "step"
        if self.local_sums.holds(index):
            if not self.life.is_waiting:
                self.life.goes_on(Event.WAITS)
        elif not self.local_sums.diverged:
            if self.is_reduced_by_all(index):
                self.filled.note(index)
                if expected_grad_dtype(self.params[index]) is None:
                    self.filled.note(GRAD_DTYPES.index(grad.dtype))  # which chooses the bucket
        if index in self._with_hooks:
            self._lay_for_hooks(index)
        self._settled = task if self._missing == loss_scale.running() == 1.0 else -1
        missing = 1 / loss_scale.running() if self.is_outside(index) else self._missing
        return None if missing == 1.0 else grad * missing

    def missing_scale(self) -> float:
        """What a gradient of the running backward lacks of the loss scale, by which the step will divide it."""
        return self.engine.loss_scale_factor() / loss_scale.running()

    def is_reduced_by_all(self, index: int) -> bool:
        """Whether this parameter's gradient goes into a bucket as soon as it comes."""
        return True

    def take(self, param: nn.Parameter) -> bool:
        """Called by upstream's gradient hook: whether the gradient is deferred, so that upstream must not see it."""
        return self.local_sums.take(self.index[id(param)], param)

    def arrived(self, param: nn.Parameter) -> bool:
        """Called by upstream's gradient hook: whether there is a new gradient. Autograd calls it without one, too.

        One of a compiled graph has none for autograd: it came to :meth:`receive`, and may still be in ``param.grad``.
        """
        index = self.index[id(param)]
        if self.life.place(index) is not Place.ARRIVING:
            return False
        if self._with_hooks:
            self._fill_for_hooks(param)
        self.life.one_goes_on(Event.HELD if self.local_sums.defers(index) else Event.HOOKED, index)
        if torch.is_grad_enabled():
            # A backward with create_graph=True: what is accumulated is not differentiated.
            param.grad = None if param.grad is None else param.grad.detach()
        return True

    def _queue_direct_backward_end(self) -> None:
        if self.ends_direct_backward:
            return  # the user called loss.backward() instead of manual_backward()
        self.hold_in_evaluation()
        self.before_backward()
        at_end_of_backward(self._end_direct_backward)
        self.ends_direct_backward = True

    def _end_direct_backward(self) -> None:
        self.ends_direct_backward = False
        self.engine._backward_epilogue()
        self.held_in_evaluation()

    def flush(self) -> None:
        """Reduce what upstream's hooks (stages 2 and 3) have put into buckets, in the middle of a backward."""
        self.life.goes_on(Event.FLUSHED)
        self.begin_flush(nested=True)
        self.optimizer.independent_gradient_partition_epilogue()
        self.end_flush(nested=True)

    def before_epilogue(self) -> None:
        """Autograd is done with one backward, and upstream's epilogue comes next."""
        self.begin_flush()

    def end_backward(self) -> None:
        """The engine's epilogue of one backward is done: reduce, unless the hooks have or it can wait."""
        self.life.goes_on(Event.FLUSHED)
        self.end_flush()
        self.reduce_unless_held(self.reduction == "step")

    def reduce_if_needed(self) -> None:
        """Average what the ranks have accumulated since the last reduction."""
        self.shown.put_back_local()
        if self.life.is_waiting:
            self._clips_unsynced, self.unsynced, self.synced = self.unsynced, False, frozenset()
            self.life.goes_on(Event.REDUCED)
            self.local_sums.settle()
            # Also those which had no gradient on this rank: they may have one on another.
            self.reduce(frozenset(self._members - self.local_sums.hooked))
            self.local_sums.reduced()

    def reduce(self, members: frozenset[int]) -> None:
        """Average gradients over the ranks.

        Args:
            members: Indices of the parameters, the same on all ranks; those without a gradient count as zero. Those
                that have one on some rank are added to :attr:`averaged`.
        """
        raise NotImplementedError

    def finalize(self) -> None:
        """Make the averaged gradients ready for the optimizer; called by ``step()`` at the boundary."""
        raise NotImplementedError

    def total_norm(self) -> Tensor:
        """The global L2 norm of the averaged gradient, scaled as it is; called after :meth:`finalize`."""
        raise NotImplementedError

    def unseen_norm(self) -> Tensor | None:
        """The norm of the last step's gradient, if upstream's step has not read it; else None."""
        return getattr(self.optimizer, "norm_of_step", None)

    def grad_norm(self) -> float | Tensor | None:
        """The global L2 norm of the last step's averaged, unscaled gradient before clipping by norm."""
        return self.engine.get_global_grad_norm() if self._clipped_norm is None else self._clipped_norm

    def before_step(self, part: int | None = None) -> bool:
        """Whether there is a gradient to step with.

        Args:
            part: The optimizer that is to step, where there are several.

        Raises:
            RuntimeError: If the gradients of the previous step were not zeroed.
        """
        self.states.put_back()
        self.restore_used()
        if not self.used.isdisjoint(self.members(part)):
            raise RuntimeError(
                "optimizer.step() without optimizer.zero_grad() since the previous step. Under DDP this step would use"
                " the previous gradients once more; ZeRO has released them, because they were zeroed after an earlier"
                " step. Call optimizer.zero_grad() after each step, or before its first backward."
            )
        self.local_sums.settle()
        if self.life.is_any_in_flight:
            self.flush()  # a backward ended in an exception that the user has caught
        self.shown.before_step()
        self.shown.put_back()
        return not self.life.is_empty

    def skip_missing_gradients(self) -> None:
        """Let the step leave parameters alone that have no gradient on any rank, with their optimizer state."""
        self.split_steps.without((self.optimized & self._stepped()) - self.averaged)

    def after_step(self) -> None:
        """Forget the gradients that ``step()`` has used."""
        self.follow_weights()
        self.count_update(self.averaged)
        part = None if self.chain is None else self.chain.active
        self.keep_used()
        used, self._clipped_norm = self.averaged, self.norms_before_clipping.get(part)
        self.discard()
        self.used = used
        self.shown.after_step()

    def hold_again(self) -> None:
        """After a step: gather again what the user has kept of weights and of the optimizer's states."""
        self.states.follow()

    def end_reading(self) -> None:
        """Release weights that were gathered for a user's code."""

    def discard(self) -> None:
        """Drop accumulated gradients, half-filled buckets of an interrupted backward, and the clipping request."""
        self.life.goes_on(Event.DROPPED)
        self.averaged = set()
        self.forget_clips()
        self.unsynced, self.synced = False, frozenset()
        self._read_by_step.clear()
        self.shown.drop()
        self.local_sums.discard()
        if self.is_busy() and not self.engine.stepping:
            self.local_sums.lay_in_grads()  # a hook has dropped them, and the backward that runs goes on
        else:
            self._members.clear()
        self._begin_anew()
        self.ends_direct_backward = False

    # -- support -------------------------------------------------------------------------------------------------

    def retained_graph(self) -> AbstractContextManager[None]:
        """Around a backward with ``retain_graph=True``, so that the graph can be walked again."""
        return nullcontext()

    def close(self) -> None:
        """Remove the hooks, and give the parameters their class back."""
        self.hooks.remove()
        self._noting.close()
        self._routes.close()
        self.split_steps.close()
        with unwatched(self.params):
            self.shown.close()
