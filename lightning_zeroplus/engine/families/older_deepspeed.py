"""What the engine does itself on a DeepSpeed that lacks one of :data:`~.probe.OPTIONAL`.

The gradients are the same, but stage 2 does not overlap reduction with backward: the buckets of these releases race if
gradients come from several streams, and are not used. Gradients wait for the end of their backward, and
:meth:`.Zero12Accumulation.reduce` reduces them, as at stage 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from lightning_zeroplus.engine.families.zero3 import Zero3Accumulation
from lightning_zeroplus.engine.families.zero3_overrides import Zero3Overrides
from lightning_zeroplus.engine.families.zero12 import Zero12Accumulation, _Zero12Overrides
from lightning_zeroplus.engine.reduction.exchange import Piece
from lightning_zeroplus.engine.upstream import probe

_INVALID_NORM = "a step that an invalid norm leaves out at ZeRO 3"


def zero12() -> type[Zero12Accumulation]:
    """The accumulation for stages 1 and 2 on the installed DeepSpeed."""
    if probe.has("one flat buffer for reduced gradients") and probe.has("reduction overlapped with backward at ZeRO 2"):
        return Zero12Accumulation
    return OlderZero12Accumulation


def zero3() -> type[Zero3Accumulation]:
    """The accumulation for stage 3 on the installed DeepSpeed."""
    features = "the boundary of an accumulation", "deferred offload at ZeRO 3", _INVALID_NORM
    return Zero3Accumulation if all(map(probe.has, features)) else OlderZero3Accumulation


def await_gathers(config: dict[str, Any]) -> None:
    """Change ``config``, in place, such that the weights of stage 3 are gathered before they are read.

    These releases start an all-gather per parameter and wait for the last one only. On CUDA the others have ended by
    then. With gloo they may not have, and whatever was in the memory would be read as weights.

    Args:
        config: A complete DeepSpeed config.
    """
    zero = config["zero_optimization"]
    cpu = get_accelerator().device_name() == "cpu"
    if zero["stage"] == 3 and cpu and not probe.has("every gather of several parameters awaited"):
        zero["stage3_allgather_sequential"] = True


class _Boundary:
    """Overrides on an optimizer whose accumulation boundary is a plain attribute, set by upstream's engine."""

    def set_gradient_accumulation_boundary(self: Any, is_boundary: bool) -> None:
        """Set the boundary; newer releases have this method."""
        if probe.has("the boundary of an accumulation"):
            super().set_gradient_accumulation_boundary(is_boundary)  # type: ignore[misc]
        else:
            self.is_gradient_accumulation_boundary = is_boundary


class _OlderZero12Overrides(_Boundary, _Zero12Overrides):
    """Overrides on ``DeepSpeedZeroOptimizer``."""


class OlderZero12Accumulation(Zero12Accumulation):
    """Reduces at the end of every backward, or later, into flat buffers of its own.

    Relies on upstream: ``step()`` reads ``averaged_gradients``, a list of tensors per group that make up this rank's
    partition. Under offload it reads ``single_partition_of_fp32_groups[...].grad``, ``norm_for_param_grads`` and the
    overflow tracker.
    """

    mixin = _OlderZero12Overrides

    def __init__(self, *args: Any) -> None:
        self._flat: dict[int, Tensor] = {}
        super().__init__(*args)

    def _hooks_reduce(self) -> bool:
        return False

    def _order_streams(self) -> None:
        """Do nothing: upstream's buckets are not used, and :class:`.LocalSums` orders the streams."""

    def _flat_partition(self, group: int) -> Tensor:
        """This rank's averaged gradients of a group, flat; made of zeros at the first access since the last step."""
        if group not in self._flat:
            optimizer = self.optimizer
            if optimizer.cpu_offload:
                self._flat[group] = optimizer.single_partition_of_fp32_groups[group].grad.view(-1).zero_()
            else:
                self._flat[group] = torch.zeros(
                    int(optimizer.partition_size[group]),
                    dtype=optimizer.gradient_accumulation_dtype,
                    device=self.engine.device,
                )
        return self._flat[group]

    def _slot(self, piece: Piece) -> Tensor:
        group, start, offset = self._places[piece.param]
        return self._flat_partition(group).narrow(0, offset + piece.start - start, piece.numel)

    def _part_read(self, index: int, read: Mapping[int, Tensor]) -> Tensor | None:
        part = super()._part_read(index, read)
        # Under offload the next gradient overwrites what the step has read.
        return part.clone() if part is not None and self.optimizer.cpu_offload else part

    def _add_to_offloaded(self, index: int) -> None:
        """Do nothing: :meth:`_average_into_partition` has added it."""

    def finalize(self) -> None:
        optimizer = self.optimizer
        self.reduce_if_needed()
        optimizer.set_gradient_accumulation_boundary(True)
        for group, params in enumerate(optimizer.params_in_partition):
            if optimizer.cpu_offload:
                self._describe_offloaded(group, params)
            else:
                # A view per parameter, because upstream computes the norm parameter by parameter; then the padding.
                views = [self._view(group, param) for param in params]
                padding = self._flat_partition(group)[sum(view.numel() for view in views) :]
                optimizer.averaged_gradients[group] = [*views, padding] if padding.numel() else views

    def _describe_offloaded(self, group: int, params: list[nn.Parameter]) -> None:
        for param in params:
            view = self._view(group, param)
            self.optimizer.norm_for_param_grads[self.optimizer.get_param_id(param)] = view.double().norm(2)
            self.optimizer.update_offload_overflow_tracker(view)

    def _view(self, group: int, param: nn.Parameter) -> Tensor:
        _, start, offset = self._places[self.index[id(param)]]
        flat = self._flat_partition(group)
        return flat.narrow(0, offset, min(param.numel() - start, flat.numel() - offset))

    def discard(self) -> None:
        self._flat.clear()
        super().discard()


class _OlderZero3Overrides(_Boundary, Zero3Overrides):
    """Overrides on ``DeepSpeedZeroOptimizer_Stage3``."""

    def finalize_gradient_accumulation_boundary(self: Any) -> None:
        """Under offload, copy the sums to the fp32 gradients and compute their norms.

        Upstream does so in ``partition_grads()`` at the boundary, after it has added a gradient: a zero one here.
        """
        self.set_gradient_accumulation_boundary(True)
        if not self.offload_optimizer:
            return
        reduced = self.gradient_accumulation.reduced
        params = [param for group in self.fp16_groups for param in group if param.ds_id in reduced]
        rank = dist.get_rank(group=self.dp_process_group)
        sizes = [max(0, min(p.partition_numel(), p.ds_numel - rank * p.partition_numel())) for p in params]
        device = self.gradient_accumulation.engine.device
        zeros = torch.zeros(max(sizes, default=0), dtype=self.gradient_accumulation_dtype, device=device)
        self.partition_grads(params, [zeros.narrow(0, 0, size) for size in sizes])

    def _overflow_check_and_loss_scale_update(self: Any, *args: Any, **kwargs: Any) -> bool:
        """Look for overflows of fp32 gradients that have a loss scale, too: these releases look at fp16 ones."""
        if self._skips_steps() and self.dtype != torch.float16 and not probe.has(_INVALID_NORM):
            self.check_overflow()
        return bool(super()._overflow_check_and_loss_scale_update(*args, **kwargs))  # type: ignore[misc]


class OlderZero3Accumulation(Zero3Accumulation):
    """Finalizes an accumulation under offload without upstream's method for it, and finds overflows in fp32."""

    mixin = _OlderZero3Overrides
