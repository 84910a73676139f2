"""The patched DeepSpeed engine: a backward always accumulates, ``step()`` is the accumulation boundary."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from torch import Tensor
from torch.optim import Optimizer

from lightning_zeroplus.engine import compiled_parts
from lightning_zeroplus.engine.accumulation import GradientAccumulation
from lightning_zeroplus.engine.clipping import ClipsGradients
from lightning_zeroplus.engine.compiles import CompilesRegions
from lightning_zeroplus.engine.copies import CopiesModule
from lightning_zeroplus.engine.families.choose import choose
from lightning_zeroplus.engine.families.low_precision import MasterWeightAccumulation
from lightning_zeroplus.engine.families.zeroes import ZeroesGradientsOfModule
from lightning_zeroplus.engine.gathering.after_writes import GathersAfterWrites
from lightning_zeroplus.engine.optimizer.anew.exchanges import ExchangesOptimizers
from lightning_zeroplus.engine.optimizer.chain import parts_of
from lightning_zeroplus.engine.optimizer.groups import UserGroups, keep_users_optimizer
from lightning_zeroplus.engine.optimizer.several import shown
from lightning_zeroplus.engine.reduction.local_sums import Reduction
from lightning_zeroplus.engine.scaling import ScalesLosses, loss_scaler
from lightning_zeroplus.engine.state.layout import Slot, slots
from lightning_zeroplus.engine.upstream import partitioned_weights
from lightning_zeroplus.engine.upstream.dtypes import ReducesEveryDtype
from lightning_zeroplus.engine.upstream.partitioned_weights import InferenceOverrides
from lightning_zeroplus.engine.upstream.passes import ShortPasses
from lightning_zeroplus.engine.upstream.several_calls import as_one_step
from lightning_zeroplus.engine.windows import HoldsGradients
from lightning_zeroplus.gradients import loss_scale
from lightning_zeroplus.gradients.again import evaluates_again, needs_closure
from lightning_zeroplus.gradients.default_dtype import in_fp32
from lightning_zeroplus.gradients.dtype import any_grad_dtype
from lightning_zeroplus.gradients.module_buffers import BufferBroadcast
from lightning_zeroplus.gradients.module_zero_grad import ModuleZeroGrad
from lightning_zeroplus.gradients.patches.block_steps import every_step_in_blocks
from lightning_zeroplus.gradients.patches.specialize import specialize
from lightning_zeroplus.gradients.ranks.agreement import end_group, group_of_hosts
from lightning_zeroplus.gradients.ranks.several import LockstepGroup
from lightning_zeroplus.weights.gathered import check_not_gathered
from lightning_zeroplus.weights.listed import list_some
from lightning_zeroplus.weights.partitioned import ordinary


class ZeroPlusEngine(
    CopiesModule,
    ExchangesOptimizers,
    HoldsGradients,
    ClipsGradients,
    ScalesLosses,
    CompilesRegions,
    ZeroesGradientsOfModule,
    ReducesEveryDtype,
    ShortPasses,
    DeepSpeedEngine,
):
    """A DeepSpeed engine in which any number of backwards between two steps gives DDP's gradient.

    Built with :func:`~.build.build_engine`. Upstream's schedule counts micro-batches; here the caller owns it:
    ``backward()`` accumulates and ``step()`` updates, always.

    Args:
        reduction: When gradients are reduced: in every ``"backward"``, once per ``"step"``, or ``"auto"``: see
            :meth:`.HoldsGradients.when_to_reduce`.
        accumulate_dtype: The dtype in which local gradients are summed; None: as the config says.
        grad_dtypes: By name of the parameter, the dtype that its gradients should have; None: as they come.
        bucket_buffers: Physical buffers that take turns as reduction buckets at stages 1 and 2 with ``overlap_comm``.
        lockstep_group: See the attributes.
        scales_losses: Whether fp32 weights are trained with a loss scale, that of the config's section ``fp16``.
        **kwargs: Arguments of :class:`deepspeed.DeepSpeedEngine`.

    Attributes:
        stepping: True while ``step()`` runs.
        updating: True while upstream's part of ``step()`` runs: gradient norm, overflow check and update.
        gradient_accumulation: The gradients between two steps; None without an optimizer.
        buffers: Keeps the ranks' buffers alike; None without an optimizer.
        has_configured_wire_dtype: The config names one ``communication_data_type`` for all; else a gradient is reduced
            in the dtype that it should have.
        destroyed: :meth:`destroy` has been called.
        hosts: The process group in which the hosts of the ranks agree; None: the group of all.
        meets_before_steps: A rank may run modules between its last backward and a step, which the others do not.
        lockstep_group: The models that keep step with this one on all ranks (stage 3); None: there is no other.
        averages: Averages of this rank's shards, which checkpoints save; by name and index of the first element.
        kept_slots: After :meth:`close`, this rank's part of the state, which the module's parameters no longer show.
    """

    # Class attributes, because the base class asks for the boundary while it is being constructed.
    stepping: bool = False
    updating: bool = False
    _global_grad_norm: Any
    gradient_accumulation: GradientAccumulation | None = None
    buffers: BufferBroadcast | None = None
    destroyed: bool = False
    hosts: Any = None
    meets_before_steps: bool = False
    averages: Mapping[tuple[str, int], Tensor] = MappingProxyType({})
    kept_slots: list[Slot] | None = None

    def __init__(
        self,
        *,
        reduction: Reduction,
        accumulate_dtype: torch.dtype | None,
        grad_dtypes: Mapping[str, torch.dtype | None],
        bucket_buffers: int,
        lockstep_group: LockstepGroup | None = None,
        scales_losses: bool = False,
        **kwargs: Any,
    ) -> None:
        self.bucket_buffers, self.lockstep_group = bucket_buffers, lockstep_group
        config = kwargs["config_class"]
        self.loss_scaler = loss_scaler(config.float16_config) if scales_losses else None
        low = torch.bfloat16 if config.bfloat16_config.enabled else None
        low = torch.float16 if low is None and config.float16_config.enabled else low
        optimizer = kwargs["optimizer"]
        self._low_precision = low
        self._accumulation_settings = reduction, accumulate_dtype, grad_dtypes
        self.user_groups = None if optimizer is None else UserGroups(optimizer)
        with any_grad_dtype(kwargs["model"], low), self._no_frozen_group():
            super().__init__(**kwargs)
        self.has_configured_wire_dtype = self._config.communication_data_type is not None
        if self.basic_optimizer is not None:
            self.hosts = group_of_hosts(self.device)
            self._accumulate()
            self.buffers = BufferBroadcast(self.module, self.device)
            self._support_torch_style_backward = True  # at stage 0 too: our tensor hooks end it
        elif isinstance(self.optimizer, DeepSpeedZeRoOffload):
            specialize(self.optimizer, InferenceOverrides)
            specialize(self.optimizer.get_param_coordinator(), GathersAfterWrites)

    def _no_frozen_group(self) -> AbstractContextManager[None]:
        return nullcontext() if self.user_groups is None else self.user_groups.each_with_a_trainable()

    def _accumulate(self) -> None:
        if self.user_groups is None:  # the config names the optimizer
            self.user_groups = UserGroups.of_all(self.basic_optimizer, self.module)
        keep_users_optimizer(self.optimizer, self.basic_optimizer)
        self._give_loss_scaler()
        family = choose(self.optimizer, self.loss_scaler is not None)
        self.gradient_accumulation = family(self, self.optimizer, *self._accumulation_settings)
        for part in parts_of(self.basic_optimizer):
            if part is not None and needs_closure(part):
                evaluates_again(part, self.gradient_accumulation)
        self._module_zero_grad = ModuleZeroGrad(self.module, self.gradient_accumulation.zero_grad)

    def build_optimizer(self, optimizer: Optimizer) -> None:
        """Build upstream's optimizer, and the accumulation, around a torch optimizer that has the module's parameters.

        Args:
            optimizer: The torch optimizer; its parameters may have been partitioned before.
        """
        previous = self.gradient_accumulation
        assert previous is not None
        self._module_zero_grad.remove()
        with in_fp32():  # a forward may have begun
            with any_grad_dtype(self.module, self._low_precision), self._no_frozen_group():
                self._configure_optimizer(optimizer, None)
            self._accumulate()
        assert self.gradient_accumulation is not None
        self.gradient_accumulation.go_on_as(previous)

    def is_gradient_accumulation_boundary(self) -> bool:
        """True only while ``step()`` runs.

        Upstream asks this in ``backward`` (no: accumulate) and in ``step`` (yes: update).
        """
        return self.stepping

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, with the buffers of rank 0 if it is being trained."""
        if self.gradient_accumulation is not None and torch.is_grad_enabled():
            self.adopt_edited_groups()
            self.gradient_accumulation.adopt_unfrozen()
            self.gradient_accumulation.restore_hooks()
        if self.buffers is not None:
            self.buffers.before_forward()
        return super().forward(*args, **kwargs)

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool | None = None,
        scale_wrt_gas: bool = True,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> Tensor:
        """Differentiate ``loss`` and add the gradients to what is accumulated since the last step.

        Args:
            loss: A scalar that requires grad: any shape with one element, any float dtype, with or without a
                ``grad_fn`` (a leaf whose hooks run nested backwards, as cached losses return, is a loss too).
            retain_graph: Keep the graph for another backward.
            scale_wrt_gas: As upstream; gradient accumulation steps are always 1 here.
            create_graph: Make a graph of the derivatives, for higher ones. The graph is kept, too.
            inputs: The leaves whose gradients are accumulated; None: all.

        Raises:
            RuntimeError: If gradients were clipped that wait since ``no_sync()``.
        """
        retain_graph = create_graph if retain_graph is None else retain_graph
        accumulation = self.gradient_accumulation
        assert accumulation is not None, "backward() needs an engine with an optimizer"
        if create_graph or inputs is not None:
            # Without the loss scale: other leaves get gradients, too, and derivatives are differentiated.
            with accumulation.retained_graph() if retain_graph else nullcontext():
                loss.backward(retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)
            return loss
        accumulation.before_backward()
        if isinstance(loss, Tensor) and loss.requires_grad and loss.grad_fn is None:
            loss = loss.clone()  # upstream asks for a grad_fn; the leaf and its hooks stay in the graph
        loss = self.scaled_for_upstream(loss)
        compiled = self.compilation
        around = accumulation.resting_hooks() if compiled is None else compiled.backward_context()
        kept = accumulation.retained_graph() if retain_graph else nullcontext()
        with loss_scale.scaled_by(self.loss_scale_factor()), kept, around, self.backwards_nest():
            return super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)

    def allreduce_bucket(self, bucket: list[Tensor], dp_group: Any, dp_world_size: int | None = None) -> Tensor:
        """Reduce gradients in the dtype that they have, unless the config names one for all."""
        if self.has_configured_wire_dtype:
            return super().allreduce_bucket(bucket, dp_group, dp_world_size)
        self._config.communication_data_type = bucket[0].dtype
        try:
            return super().allreduce_bucket(bucket, dp_group, dp_world_size)
        finally:
            self._config.communication_data_type = None

    def _backward_prologue(self) -> None:
        """Nothing without an optimizer, where upstream refuses a backward: gradients go on to other modules."""
        if self.gradient_accumulation is not None:
            super()._backward_prologue()

    def _backward_epilogue(self) -> None:
        """Upstream reduces through the stage-2/3 hooks here; then the accumulation does the other stages."""
        if self.gradient_accumulation is not None:
            self.gradient_accumulation.before_epilogue()
        super()._backward_epilogue()
        if self.gradient_accumulation is not None:
            self.gradient_accumulation.end_backward()

    def meet(self, number: int = 0) -> bool:
        """All ranks come here, each after forwards of its own, which no backward follows.

        Args:
            number: That this rank brings along.

        Returns:
            Whether the ranks met (stage 3), had all done the same before, and brought the same number.
        """
        return self.gradient_accumulation is not None and not self.stepping and self.gradient_accumulation.sync(number)

    def shown_optimizers(self) -> list[Any]:
        """What the user steps: the engine's optimizer, or one for each of those that it chains."""
        accumulation = self.gradient_accumulation
        chain = None if accumulation is None else accumulation.chain
        return [self.optimizer] if chain is None else [shown(self, number) for number in range(len(chain.parts))]

    @contextmanager
    def outside_step(self) -> Iterator[None]:
        """Within, although a step runs: forwards and backwards."""
        before, self.stepping, self.updating = (self.stepping, self.updating), False, False
        try:
            yield
        finally:
            self.stepping, self.updating = before

    def step(self, lr_kwargs: dict[str, Any] | None = None, part: int | None = None) -> None:
        """Update the parameters with all gradients since the last step.

        Without any gradient since ``zero_grad()`` nothing happens, as torch optimizers skip such parameters.

        Args:
            lr_kwargs: As upstream.
            part: Which of several optimizers steps; None: all.

        Raises:
            RuntimeError: If the gradients of the previous step were not zeroed; or within ``no_sync()`` or a window.
        """
        self.adopt_edited_groups()
        accumulation = self.gradient_accumulation
        assert accumulation is not None, "step() needs an engine with an optimizer"
        accumulation.check_not_held()
        check_not_gathered(accumulation.params)
        if part is not None and accumulation.has_overflown(accumulation.members(part)):
            accumulation.clips.pop(part, None)
            return
        if not accumulation.before_step(part):
            accumulation.discard()  # for example a clipping request
            accumulation.hold_again()
            return
        with accumulation.alone(part) as is_there:
            if is_there and accumulation.optimized:
                self._step(accumulation, lr_kwargs)
        accumulation.hold_again()
        if self.compilation is not None:
            self.compilation.parameters_changed()

    def _step(self, accumulation: GradientAccumulation, lr_kwargs: dict[str, Any] | None) -> None:
        with self._flag("stepping"), in_fp32():
            accumulation.take_written_weights()
            accumulation.finalize()
            accumulation.skip_missing_gradients()
            scale = self.loss_scale_factor()
            # Older releases gather the updated weights into a tensor that requires grad, which torch 2.13 refuses.
            parts = parts_of(accumulation.torch_optimizer)
            steps, once = every_step_in_blocks(parts), as_one_step(parts)
            with torch.no_grad(), accumulation.clipping(), self._flag("updating"), steps, once:
                super().step(lr_kwargs)
            self._update_loss_scale()
            if self.skips_steps():
                if getattr(self.optimizer, "overflow", False):
                    self._global_grad_norm = math.inf  # older releases keep the norm of the step before
            elif (norm := accumulation.unseen_norm()) is not None:
                self._global_grad_norm = norm
            if isinstance(accumulation, MasterWeightAccumulation):
                self._global_grad_norm /= scale  # upstream's is of the scaled gradient
        accumulation.after_step()

    def note_global_grad_norm(self, norm: Any) -> None:
        """Set what :meth:`get_global_grad_norm` returns."""
        self._global_grad_norm = norm

    @contextmanager
    def _flag(self, name: str) -> Iterator[None]:
        setattr(self, name, True)
        try:
            yield
        finally:
            setattr(self, name, False)

    def load_checkpoint(self, load_dir: str, tag: str | None = None, **kwargs: Any) -> tuple[Any, Any]:
        """Load a checkpoint; at stage 3 without an optimizer, also the partitioned weights, which upstream forgets."""
        path, client_state = super().load_checkpoint(load_dir, tag, **kwargs)
        if path is not None and isinstance(self.optimizer, DeepSpeedZeRoOffload):
            partitioned_weights.load_partitioned_weights(self.module, load_dir, tag)
        if self.compilation is not None:
            self.compilation.parameters_changed()
        return path, client_state

    def close(self, whole: bool) -> None:
        """:meth:`destroy`, and make the module an ordinary one. The engine still knows its state, for a checkpoint.

        Args:
            whole: At stage 3, give the module its whole weights, with all ranks together. If False, or if there is too
                little host memory, they stay partitioned, and access to them raises.
        """
        if not self.destroyed:
            kept = None if self.zero_nvme_offload_optimizer() else slots(self)
            if whole and ordinary.make_whole(self.module):
                self.kept_slots = kept
            self.destroy()

    def destroy(self) -> None:
        """Remove every hook that this engine has put on the module and its parameters, ours and upstream's."""
        if self.destroyed:
            return
        self.destroyed = True
        self.close_compilation()
        if self.gradient_accumulation is not None:
            self.gradient_accumulation.close()
            self._module_zero_grad.remove()
            self.gradient_accumulation.give_back_optimizers()
        for name in {"module_forward_pre_hook", "module_forward_post_hook"} & vars(self).keys():
            vars(self)[name].remove()
        super().destroy()
        end_group(self.hosts)
        if isinstance(self.optimizer, DeepSpeedZeRoOffload):  # an engine without an optimizer
            self.optimizer.destroy()
        ordinary.release(self.module)
        list_some(self.module)
        compiled_parts.join(self.module)
        partitioned_weights.forget_functions(self.module)
        partitioned_weights.forget_modules()


def gradient_norm(engine: ZeroPlusEngine, part: int | None = None) -> float | None:
    """The global L2 norm of the last step's averaged, unscaled gradient before clipping, or None.

    Args:
        engine: The engine.
        part: Of the last step of this one of several optimizers.
    """
    accumulation = engine.gradient_accumulation
    if accumulation is None:
        return None
    norm = accumulation.grad_norm() if part is None else accumulation.norms.get(part)
    return None if norm is None else float(norm)
