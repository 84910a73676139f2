"""When ZeRO stage 3 gathers and releases weights, where upstream's coordinator expects one plain forward and backward.

Upstream gathers a module's weights in a backward as often as the module's forward was run, and releases them once. A
graph that is walked again finds empty tensors, and so does the second derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, free_param
from torch import nn

from lightning_zeroplus.engine.gathering.all_whole import AllWhole
from lightning_zeroplus.engine.gathering.containers import SeesContainers
from lightning_zeroplus.engine.gathering.held import Held, KeepsForSecondDerivatives, User, is_held, keep
from lightning_zeroplus.engine.gathering.linear import forward_derivatives
from lightning_zeroplus.engine.gathering.on_gloo import collectives, faster_gathers, updates_in_place
from lightning_zeroplus.engine.gathering.resident import (
    Residents,
    has_nothing,
    has_others,
    in_trace,
    is_there_after_steps,
    leave_alone,
    outside_inference,
    own_parameters,
    passes_on,
    stays,
    stays_whole,
    without_others,
)
from lightning_zeroplus.engine.gathering.views import ViewsFollow
from lightning_zeroplus.gradients.patches.specialize import generalize, specialize
from lightning_zeroplus.gradients.patches.transforms import given_whole, has_duals, is_transformed, outside_transforms
from lightning_zeroplus.gradients.ranks.lockstep import Gather, Reset
from lightning_zeroplus.gradients.ranks.several import Member
from lightning_zeroplus.gradients.tasks import current_task
from lightning_zeroplus.weights.errors import check_not_traced
from lightning_zeroplus.weights.partitioned.access import whole
from lightning_zeroplus.weights.partitioned.partition import keep_written, settle

#: How many outputs of a module have a backward that still gathers its weights.
_GATHERS = "applied_pre_backward_ref_cnt"
#: How many inputs of a module have a backward that still has to run before its weights are released.
_RELEASES = "ds_grads_remaining"


class _Always(int):
    """A counter that is never used up."""

    def __add__(self, other: Any) -> _Always:
        return self

    __sub__ = __add__


class _GathersAsNeeded:
    """Mixin for upstream's ``PartitionedParameterCoordinator``.

    Attributes:
        lockstep: Asked before anything is gathered.
        index: By ``ds_id`` of a parameter, its index.
        kept: Weights that are needed after the end of their module, until :meth:`Gathers.release` at the latest.
        outside: By ``ds_id`` of a module, of how many weights outside of it upstream knows that it reads them.
        needed: The indices of the weights that are about to be used, those among them that are whole already, too.
        is_reading: While a user's code gets weights outside of their modules.
    """

    lockstep: Member
    index: Mapping[int, int]
    kept: set[Any]
    outside: dict[int, int]
    needed: set[int] | frozenset[int] = frozenset()
    is_reading = False

    @torch.compiler.disable
    def reset_step(self: Any) -> None:
        """A forward begins. Upstream compares which modules the ranks have run, and raises on all of them but one."""
        check_not_traced()  # as a logger does it, on rank 0
        if self.lockstep.diverged:
            self._forget()  # the others may not begin one
            return
        if self.is_complete_trace():
            self.lockstep.note(Reset(0))
        else:
            modules = self._PartitionedParameterCoordinator__submodule_order
            order = self.is_record_trace(), tuple(map(in_trace, modules))
            if not self.lockstep.meet(Reset(1 + (hash(order) >> 2))) or any(map(has_others, modules)):
                self._forget()
                return
        super().reset_step()  # type: ignore[misc]

    def _forget(self: Any) -> None:
        (self._clean_inflight_param_registry if self.is_invalid_trace() else self._invalidate_trace)()

    def fetch_sub_module(self: Any, current_submodule: Any, forward: bool) -> None:
        """Gather the weights of a module, except those that are not partitioned: another's, for this call."""
        outside = len(vars(current_submodule).get("_external_params", ()))
        if outside != self.outside.setdefault(current_submodule.ds_id, outside):
            # From now on upstream fetches the weights that a module has read with its own, and the trace lacks them.
            self.outside[current_submodule.ds_id] = outside
            if self.is_complete_trace():
                self._invalidate_trace()
        with without_others(current_submodule), outside_transforms(), outside_inference():
            super().fetch_sub_module(current_submodule, forward)  # type: ignore[misc]

    def _PartitionedParameterCoordinator__params_to_release(self, submodule: nn.Module, step_id: int) -> set[int]:
        try:
            return super()._PartitionedParameterCoordinator__params_to_release(submodule, step_id)  # type: ignore[misc]
        except AttributeError:  # `torch.func.functional_call` has put other tensors into modules that come later
            return {
                param.ds_id for param in own_parameters(submodule) if hasattr(param, "ds_id") and not param.ds_persist
            }

    def release_sub_module(self, submodule: nn.Module, forward: bool = False) -> None:
        """Release the weights of a module.

        When a checkpoint computes a forward again, torch keeps frozen weights themselves, and looks at their shapes
        before the backward of their module gathers them: they are released after that.
        """
        if not submodule._parameters:
            super().release_sub_module(submodule, forward)  # type: ignore[misc]
            return
        is_recomputed, transformed = forward and current_task() != -1, is_transformed() or has_duals()
        with without_others(submodule), outside_transforms(), outside_inference():
            for param in own_parameters(submodule):
                if transformed:  # graphs that do not come by the output have seen the weight where it is
                    keep(self.kept, param, User.TRANSFORMED)
                if not is_recomputed:
                    param.ds_active_sub_modules.discard(User.RECOMPUTED)
                elif not param.requires_grad:
                    keep(self.kept, param, User.RECOMPUTED)
                if param.ds_status is ZeroParamStatus.AVAILABLE and is_held(param):
                    keep(self.kept, param, User.SEEN)
                else:
                    param.ds_active_sub_modules.discard(User.SEEN)
            super().release_sub_module(submodule, forward)  # type: ignore[misc]

    def _PartitionedParameterCoordinator__release_param(self, param: Any, free_data: bool = True) -> None:
        """Release a weight that does not stay. Upstream releases others, too, while it knows no order of modules.

        Without ``free_data``, upstream frees the memory of every weight of the module right afterwards.
        """
        if not (free_data and stays(param)):
            super()._PartitionedParameterCoordinator__release_param(param, free_data)  # type: ignore[misc]

    def _PartitionedParameterCoordinator__all_gather_params(self, params: Iterable[Any], forward: bool) -> None:
        wanted = [self.index[param.ds_id] for param in params if param.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        if wanted:
            check_not_traced()
            self.needed = {self.index[param.ds_id] for param in params}
        if not wanted or self.lockstep.meet(Gather(tuple(sorted(wanted))), partial(self._were_read, params)):
            self.gather(params, forward)
        self.needed = frozenset()

    def _were_read(self, params: Iterable[Any]) -> bool:
        """Whether weights that a user reads were gathered with the others, who may have written them by now."""
        return self.is_reading and all(param.ds_status is ZeroParamStatus.AVAILABLE for param in params)

    def gather(self, params: Iterable[Any], forward: bool) -> None:
        """Gather weights, as all ranks do now."""
        with faster_gathers():
            for each in collectives(params, forward):
                super()._PartitionedParameterCoordinator__all_gather_params(each, forward)  # type: ignore[misc]


class Gathers:
    """The gathers of one engine's weights.

    Args:
        offload: Upstream's ``parameter_offload`` of the optimizer.
        module: The engine's module.

    Attributes:
        held: The weights that have been released, and whose memory other tensors have.
        all_whole: While all weights are whole.
        updates: Updates the weights that stay after a step; None: upstream does it.
    """

    def __init__(self, offload: Any, module: nn.Module) -> None:
        self._offload = specialize(offload, KeepsForSecondDerivatives)
        self._coordinator = specialize(offload.get_param_coordinator(), ViewsFollow)
        specialize(self._coordinator, _GathersAsNeeded)
        self._coordinator.outside = {}
        self.held = Held()
        self._offload.kept = self._coordinator.kept = self._kept = set[Any]()
        self._derivatives = ExitStack()
        self._derivatives.enter_context(forward_derivatives())
        self._derivatives.enter_context(given_whole(partial(whole, name="torch.func")))
        self._modules = list(module.modules())
        self._params: list[Any] = list(module.parameters())
        self._small = {id(param) for param in self._params if is_there_after_steps(param)}
        self._offload.release_all = self._release_all
        inner = [each for each in self._modules if each is not module]
        residents = [each for each in inner if stays_whole(each)]
        leave_alone(offload, [*residents, *(each for each in inner if has_nothing(each) or passes_on(each))])
        SeesContainers(self._modules, offload.forward_hooks, offload.backward_hooks)
        self.updates = updates_in_place([param for param in self._params if id(param) in self._small])
        self.all_whole = AllWhole(self._modules, self._params, Residents(residents, self.fetch), offload)
        for each in self._modules:
            setattr(each, _GATHERS, _Always(1))
            setattr(each, _RELEASES, 0)  # a copy of the module may run before the module itself
            for name in ("pre_bwd_fn", "post_bwd_fn"):
                function = vars(each).get(name)
                if function is not None:  # of this engine alone; they give back what they get
                    function.generate_vmap_rule, function.jvp = True, staticmethod(_same)
                    # Torch asks for it in every call, and to find it costs more than the call.
                    function.forward.__signature__ = signature(function.forward)

    def keep_step(self, lockstep: Member, index: Mapping[int, int]) -> None:
        """Gather nothing that the other ranks do not gather as well.

        Args:
            lockstep: Asked before anything is gathered.
            index: By ``ds_id`` of a parameter, its index in ``module.parameters()``.
        """
        self._coordinator.lockstep, self._coordinator.index = lockstep, index

    @torch.inference_mode(False)
    @torch.no_grad()
    def together(self, indices: Iterable[int], kept: Iterable[int]) -> None:
        """Gather weights that some rank needs; all ranks call it.

        Args:
            indices: Of the parameters; the same on all ranks.
            kept: Of those that this rank needs. The others are released, unless they were there before.
        """
        coordinator = self._coordinator
        in_flight = coordinator._PartitionedParameterCoordinator__inflight_param_registry
        params, needed = [self._params[index] for index in indices], coordinator.needed.union(kept)
        passing = []
        for index, param in zip(indices, params, strict=True):
            if param in in_flight:
                in_flight.pop(param).wait()
            if param.ds_status is ZeroParamStatus.AVAILABLE:
                if self.held.note(param) and index not in needed and not param.ds_persist:
                    param.ds_active_sub_modules.discard(User.HELD)  # others may write to it next: it is gathered again
                    passing.append(param)
                keep_written(param)
                param.ds_status = ZeroParamStatus.NOT_AVAILABLE  # it takes part as the others do
            elif index not in needed and not param.ds_persist:  # others stay, on all ranks
                if coordinator.is_reading:
                    keep(self._kept, param, User.READ)
                else:
                    passing.append(param)
        coordinator.gather(params, True)
        for param in params:
            if param in in_flight:
                in_flight.pop(param).wait()
        for param in passing:
            coordinator._PartitionedParameterCoordinator__release_param(param)

    @torch.inference_mode(False)  # a validation may read what a graph needs next
    @torch.no_grad()
    @outside_transforms()
    def fetch(self, params: Iterable[Any]) -> None:
        """Gather weights that this rank needs. The others take part, wherever they are in their forwards."""
        listed = list(params)
        self._coordinator._PartitionedParameterCoordinator__all_gather_params(set(listed), True)
        for param in listed:
            settle(param)

    def read(self, params: Iterable[Any]) -> None:
        """Gather weights that a user's code needs outside of their modules, until :meth:`end_reading`.

        If the ranks read different ones, each keeps all. All may write them next, each its copy: a rank that gathered
        one later would have what others have written by then.
        """
        listed = list(params)
        self._coordinator.is_reading = True
        try:
            self.fetch(listed)
        finally:
            self._coordinator.is_reading = False
        for param in listed:
            param.before_giving()
            keep(self._kept, param, User.READ)

    def users(self) -> dict[int, set[Any]]:
        """What uses the weights that are whole on this rank and do not stay, by index."""
        there = {i: param for i, param in enumerate(self._params) if param.ds_status is ZeroParamStatus.AVAILABLE}
        return {i: param.ds_active_sub_modules for i, param in there.items() if not param.ds_persist}

    def keep_together(self, missing: Iterable[int], read: Iterable[int], others: Iterable[int]) -> None:
        """Gather weights that some rank has and others lack. All ranks call it, with the same indices.

        Args:
            missing: The weights.
            read: Those that all ranks keep until :meth:`end_reading`.
            others: Those that all ranks keep until :meth:`release`.
        """
        self.together(missing, missing)
        for indices, user in ((read, User.READ), (others, User.ELSEWHERE)):
            for index in indices:
                keep(self._kept, self._params[index], user)

    def end_reading(self) -> None:
        """Release what :meth:`read` has gathered, with what was written to it, unless its memory is held."""
        for param in [param for param in self._kept if User.READ in param.ds_active_sub_modules]:
            param.ds_active_sub_modules.discard(User.READ)
            if is_held(param):
                keep(self._kept, param, User.HELD)
            if not param.ds_active_sub_modules:
                self._kept.discard(param)
                if not param.ds_persist:
                    self._coordinator._PartitionedParameterCoordinator__release_param(param)

    def forget_trace(self) -> None:
        """Expect no order of modules: on all ranks, because upstream's collectives depend on it."""
        if not self._coordinator.is_invalid_trace():
            self._coordinator._invalidate_trace()

    def release(self) -> None:
        """Release what backwards have left gathered: the weights are about to change."""
        getattr(self._offload, "release_backward_leftovers", bool)()  # what upstream itself knows of
        self._kept.clear()
        # What upstream has fetched ahead for modules that did not run: it would partition it, and find it in flight.
        in_flight = self._coordinator._PartitionedParameterCoordinator__inflight_param_registry
        for param in list(in_flight):
            in_flight.pop(param).wait()
        for param in self._params:
            if param.ds_status is ZeroParamStatus.AVAILABLE and not param.ds_persist:
                self.held.note(param)
                param.ds_active_sub_modules.clear()
                self._coordinator._PartitionedParameterCoordinator__release_param(param)

    def hold(self, held: Iterable[tuple[Any, torch.Tensor]]) -> None:
        """Gather weights into the memory that they had before they were partitioned; a collective."""
        for param, memory in held:
            self.held.add(param, memory)
        self.hold_again()

    def hold_again(self) -> None:
        """After a step: gather what is held by other tensors than the weights, in its memory."""
        self.held.restore(self.fetch, partial(keep, self._kept, user=User.HELD))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a backward whose graph will be walked again, and release weights again then."""
        counts = [(each, vars(each)[_RELEASES]) for each in self._modules if _RELEASES in vars(each)]
        try:
            yield
        finally:
            for module, count in counts:
                setattr(module, _RELEASES, count)

    @torch.no_grad()
    def _release_all(self) -> None:
        # As upstream, without a walk through the modules and some ten functions for each weight.
        coordinator, freed = self._coordinator, 0
        stays_through = self.updates is not None and self.all_whole.is_stepping
        in_flight = coordinator._PartitionedParameterCoordinator__inflight_param_registry
        for param in self._params:
            if in_flight and param in in_flight:
                in_flight.pop(param).wait()
            if stays_through and param.is_contiguous():  # else it gets other memory, in which its update has a place
                keep_written(param)
                continue
            param.ds_active_sub_modules.clear()
            if param.ds_status is not ZeroParamStatus.AVAILABLE:
                continue
            self.held.note(param)
            if id(param) in self._small:
                free_param(param)
            else:
                param.partition()
            freed += param.ds_numel
        coordinator._PartitionedParameterCoordinator__n_available_params -= freed

    def _leave(self) -> None:
        """Release all weights; upstream does it with those that stay gathered, when it makes the next partitions."""
        self.release()
        for param in self._params:
            if param.ds_status is ZeroParamStatus.AVAILABLE:
                self.held.note(param)
                param.ds_active_sub_modules.clear()
        self.held.leave()

    def close(self) -> None:
        """Leave the rest to upstream. May be called again."""
        self._derivatives.close()
        self.all_whole.close()
        if isinstance(self._coordinator, _GathersAsNeeded):
            if all(hasattr(param, "ds_id") for param in self._params):
                self._leave()  # the partitions are made anew; at the end of a fit, all is whole by now
            generalize(self._coordinator, _GathersAsNeeded)
            generalize(self._offload, KeepsForSecondDerivatives)
        for each in self._modules:
            vars(each).pop(_GATHERS, None)


_same: Callable[[Any, Any], Any] = lambda ctx, tangent: tangent.view_as(tangent)  # noqa: E731
