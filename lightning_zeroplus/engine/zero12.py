"""Gradient accumulation of ZeRO stages 1 and 2 (``DeepSpeedZeroOptimizer``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_zeroplus.engine.accumulation import GradientAccumulation, Reduction, RoutedZeroGrad


class _Zero12Overrides(RoutedZeroGrad):
    """Overrides on ``DeepSpeedZeroOptimizer``; each calls ``super()``."""

    def independent_gradient_partition_epilogue(self: Any) -> None:
        """Skip the epilogue of a backward that gave no parameter a gradient.

        Upstream indexes bucket buffers which ``setup_buckets()``, called by the first gradient hook, has not made.
        """
        if self.ready_for_gradients:
            super().independent_gradient_partition_epilogue()  # type: ignore[misc]

    def async_accumulate_grad_in_cpu_via_gpu(self: Any, param: nn.Parameter) -> None:
        """Copy the first gradient of a step to the CPU, add later ones.

        Upstream decides by ``micro_step_id``, a count of backwards: a parameter that is used for the first time in
        the second backward would be added to its gradient of the previous step.
        """
        count = self.micro_step_id
        first = self.get_param_id(param) not in self._offload_accumulated_param_ids
        self.micro_step_id = 0 if first else max(count, 1)
        try:
            super().async_accumulate_grad_in_cpu_via_gpu(param)  # type: ignore[misc]
        finally:
            self.micro_step_id = count

    def unscale_and_clip_grads(self: Any, grad_groups_flat: list[Tensor], total_norm: Tensor) -> None:
        """Clip by value after upstream has unscaled."""
        super().unscale_and_clip_grads(grad_groups_flat, total_norm)  # type: ignore[misc]
        self.gradient_accumulation.clip_by_value(*grad_groups_flat)


class Zero12Accumulation(GradientAccumulation):
    """Stage 2 reduces through upstream's hooks in every backward; stage 1 reduces all parameters at once.

    Relies on upstream: with the accumulation boundary False, the epilogue adds this rank's share of the averaged
    gradients to ``all_grad_tensors`` (or to the fp32 partition, or to CPU buffers under offload), and
    ``finalize_gradient_accumulation_boundary()`` turns the sum into what ``step()`` reads.
    """

    mixin = _Zero12Overrides

    def __init__(self, engine: Any, optimizer: Any, reduction: Reduction) -> None:
        super().__init__(engine, optimizer, reduction)
        self.reduces_in_hooks = optimizer.partition_gradients
        optimizer.set_gradient_accumulation_boundary(False)

    def finalize(self) -> None:
        optimizer = self.optimizer
        optimizer.set_gradient_accumulation_boundary(True)
        if self.unreduced:
            self.reduce_if_needed()  # at the boundary, so that the epilogue leaves what step() reads
            return
        if optimizer.cpu_offload:
            self._zero_stale_offloaded_grads()
        optimizer.finalize_gradient_accumulation_boundary()

    def _zero_stale_offloaded_grads(self) -> None:
        # Upstream keeps the fp32 gradients on the CPU from step to step: a parameter without a gradient in this step
        # would be updated again with the one of an earlier step.
        optimizer = self.optimizer
        for index, group in enumerate(optimizer.params_in_partition):
            for param in group:
                param_id = optimizer.get_param_id(param)
                if param_id not in optimizer._offload_accumulated_param_ids:
                    _, _, offset, numel = optimizer.grad_position[param_id]
                    optimizer.single_partition_of_fp32_groups[index].grad.view(-1).narrow(0, offset, numel).zero_()

    def reduce(self) -> None:
        """Reduce every trainable parameter, with zeros where this rank has no gradient, so that buckets agree."""
        optimizer = self.optimizer
        optimizer.setup_buckets()
        accumulates_separately = optimizer.use_grad_accum_attribute
        for index, group in enumerate(optimizer.bit16_groups):
            for param in group:
                if not param.requires_grad:
                    continue
                if optimizer.get_gradient_for_reduction(param) is None:
                    if accumulates_separately:
                        param.grad_accum = torch.zeros_like(param, dtype=optimizer.gradient_accumulation_dtype)
                    else:
                        param.grad = torch.zeros_like(param)
                optimizer.reduce_independent_p_g_buckets_and_remove_grads(param, index)
        optimizer.independent_gradient_partition_epilogue()
        if accumulates_separately:
            # The epilogue has added them to the partition; left in place they would be added again.
            for group in optimizer.bit16_groups:
                for param in group:
                    param.grad_accum = None

    def discard(self) -> None:
        super().discard()
        optimizer = self.optimizer
        for buckets in (optimizer.all_grad_tensors, optimizer.averaged_gradients):
            for index in buckets:
                buckets[index] = None
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear()
        optimizer.extra_large_param_to_reduce.clear()
        for params in optimizer.previous_reduced_grads.values():
            params.clear()
        optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
        optimizer._release_ipg_buffers()
        optimizer.micro_step_id = -1
        # Upstream's copy of the flag follows the engine's only at the end of a backward; hooks of the first read it.
        optimizer.set_gradient_accumulation_boundary(False)
        if optimizer.cpu_offload:
            optimizer._offload_accumulated_param_ids = set()
            optimizer.reset_cpu_buffers()
