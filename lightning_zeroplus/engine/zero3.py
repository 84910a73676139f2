"""Gradient accumulation of ZeRO stage 3 (``DeepSpeedZeroOptimizer_Stage3``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from lightning_zeroplus.engine.accumulation import GradientAccumulation, Reduction, RoutedZeroGrad

# Upstream's per-module counters: outputs whose backward still has to gather the module's parameters, and inputs
# whose backward still has to run before they are released.
_MODULE_COUNTERS = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")


class _Zero3Overrides(RoutedZeroGrad):
    """Overrides on ``DeepSpeedZeroOptimizer_Stage3``; each calls ``super()``."""

    def partition_grads(self: Any, params_to_release: list[Any], grad_partitions: list[Tensor]) -> None:
        """Copy the first gradient of a step into the partition, add later ones, parameter by parameter.

        Upstream decides for the whole list by ``micro_step_id``, which only the engine's own forward advances.
        """
        reduced = self.gradient_accumulation.reduced
        pairs = list(zip(params_to_release, grad_partitions, strict=True))
        first = [pair for pair in pairs if pair[0].ds_id not in reduced]
        later = [pair for pair in pairs if pair[0].ds_id in reduced]
        count = self.micro_step_id
        try:
            for self.micro_step_id, part in ((0, first), (1, later)):
                if part:
                    super().partition_grads([p for p, _ in part], [g for _, g in part])  # type: ignore[misc]
        finally:
            self.micro_step_id = count
        reduced.update(param.ds_id for param in params_to_release)

    def unscale_and_clip_grads(self: Any, sub_group_id: int, total_norm: Tensor) -> None:
        """Clip by value after upstream has unscaled."""
        super().unscale_and_clip_grads(sub_group_id, total_norm)  # type: ignore[misc]
        self.gradient_accumulation.clip_by_value(self.fp32_partitioned_groups_flat[sub_group_id].grad)


class Zero3Accumulation(GradientAccumulation):
    """Every backward reduce-scatters into the partitions.

    Attributes:
        reduced: ``ds_id`` of the parameters whose partition holds a gradient of the current step.
    """

    mixin = _Zero3Overrides
    reduces_in_hooks = True

    def __init__(self, engine: Any, optimizer: Any, reduction: Reduction) -> None:
        self.reduced: set[int] = set()
        super().__init__(engine, optimizer, reduction)
        optimizer.set_gradient_accumulation_boundary(False)

    def finalize(self) -> None:
        optimizer = self.optimizer
        for index, group in enumerate(optimizer.fp16_groups):
            for position, param in enumerate(group):
                if param.requires_grad and param.ds_id not in self.reduced:
                    self._zero_stale_partition(index, position, param)
        optimizer.finalize_gradient_accumulation_boundary()

    def _zero_stale_partition(self, index: int, position: int, param: nn.Parameter) -> None:
        # Upstream never clears the partition of a parameter without a gradient: it would be updated again with the
        # gradient of an earlier step.
        optimizer = self.optimizer
        if not optimizer.offload_optimizer:
            optimizer.averaged_gradients[index][position].zero_()
        elif not optimizer._swappable_optimizer_subgroup(index):
            _, offset, numel = optimizer.grad_position[optimizer.get_param_id(param)]
            optimizer.fp32_partitioned_groups_flat[index].grad.narrow(0, offset, numel).zero_()

    def discard(self) -> None:
        super().discard()
        self.reduced.clear()
        optimizer = self.optimizer
        optimizer.averaged_gradients = {}
        optimizer.micro_step_id = 0
        optimizer._offload_boundary_param_ids = set()
        # Upstream's copy of the flag follows the engine's only at the end of a backward; hooks of the first read it.
        optimizer.set_gradient_accumulation_boundary(False)
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear_params()
        if optimizer.offload_optimizer:
            optimizer.reset_cpu_buffers()

    def _base_zero_grad(self) -> None:
        if get_accelerator().is_synchronized_device():
            # Upstream records the current stream on every gradient it finds, and the CPU has no stream.
            for group in self.optimizer.fp16_groups:
                for param in group:
                    param.grad = None
        super()._base_zero_grad()

    @contextmanager
    def retained_graph(self) -> Iterator[None]:
        """Restore the module counters that a backward consumes.

        Without it the second walk over a retained graph finds partitioned parameters: upstream gathers only while
        the counter of the forward's outputs is positive.
        """
        saved = [
            (module, name, module.__dict__[name])
            for module in self.engine.module.modules()
            for name in _MODULE_COUNTERS
            if name in module.__dict__
        ]
        yield
        for module, name, count in saved:
            setattr(module, name, count)
