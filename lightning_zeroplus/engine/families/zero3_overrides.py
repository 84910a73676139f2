"""What is overridden of ``DeepSpeedZeroOptimizer_Stage3``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from lightning_zeroplus.engine.families.norms import as_one
from lightning_zeroplus.engine.families.zeroes import ZeroOverrides
from lightning_zeroplus.engine.gathering.on_gloo import collectives, faster_gathers
from lightning_zeroplus.engine.gathering.resident import is_special
from lightning_zeroplus.engine.reduction.host_waits import SparesHostWaits
from lightning_zeroplus.engine.upstream.reports import without_statistics
from lightning_zeroplus.gradients.shown import read_plain, write_plain

_RELEASED = ZeroParamStatus.NOT_AVAILABLE


class Zero3Overrides(SparesHostWaits, ZeroOverrides):
    """Overrides on ``DeepSpeedZeroOptimizer_Stage3``; each calls ``super()``."""

    def partition_grads(self: Any, params_to_release: list[Any], grad_partitions: list[Tensor]) -> None:
        """Copy the first gradient of a step into the partition, add later ones, parameter by parameter.

        Upstream decides for the whole list by ``micro_step_id``, which only the engine's own forward advances.
        """
        reduced = self.gradient_accumulation.reduced
        pairs = list(zip(params_to_release, grad_partitions, strict=True))
        first = [pair for pair in pairs if pair[0].ds_id not in reduced]
        later = [pair for pair in pairs if pair[0].ds_id in reduced]
        if self._adds_together():
            self._put_together(first, torch._foreach_copy_)
            self._put_together(later, torch._foreach_add_)
        else:
            count = self.micro_step_id
            try:
                for self.micro_step_id, part in ((0, first), (1, later)):
                    if part:
                        super().partition_grads([p for p, _ in part], [g for _, g in part])  # type: ignore[misc]
            finally:
                self.micro_step_id = count
        reduced.update(param.ds_id for param in params_to_release)

    def _adds_together(self: Any) -> bool:
        """Whether upstream would only copy and add. On the CPU, to do so one by one takes longer than the sums."""
        return (
            get_accelerator().is_synchronized_device()
            and not self.offload_optimizer
            and not getattr(self, "zenflow", False)
        )

    def _put_together(self: Any, pairs: list[tuple[Any, Tensor]], put: Callable[..., Any]) -> None:
        partitions = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        places: list[Tensor] = []
        parts: list[Tensor] = []
        for param, part in pairs:
            write_plain(param, None)
            if part.numel():  # the last ranks may have nothing of a small weight
                place = partitions[param.ds_id]
                places.append(place if place.numel() == part.numel() else place.narrow(0, 0, part.numel()))
                parts.append(part.to(place.dtype))
        if places:
            put(places, parts)

    def reduce_ready_partitions_and_remove_grads(self: Any, param: Any) -> None:
        """Upstream's gradient hook: put the gradient into a bucket, unless it waits."""
        accumulation = self.gradient_accumulation
        accumulation.accumulated(param)
        if accumulation.arrived(param) and not accumulation.postpone(param) and not accumulation.take(param):
            with accumulation.filling(param):
                self.put_into_bucket(param)

    def put_into_bucket(self: Any, param: Any) -> None:
        """What upstream does with every gradient."""
        if not self.contiguous_gradients and not read_plain(param).is_contiguous():
            param.grad = param.grad.contiguous()
        super().reduce_ready_partitions_and_remove_grads(param)  # type: ignore[misc]

    def _DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(self: Any, comm_dtype: torch.dtype) -> None:
        upstream = super()._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads  # type: ignore[misc]
        self.gradient_accumulation.flush_full(comm_dtype, lambda: upstream(comm_dtype))

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(
        self: Any, params_to_reduce: list[Any], communication_data_type: torch.dtype
    ) -> list[Tensor]:
        """Average a bucket and scatter its partitions; on gloo, by a faster collective."""
        averages: list[Tensor] | None = self.gradient_accumulation.averages_on_gloo(
            params_to_reduce, communication_data_type
        )
        if averages is None:
            upstream = super()._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads  # type: ignore[misc]
            averages = upstream(params_to_reduce, communication_data_type)
        return averages

    def _get_param_partition_rank(self: Any, param: nn.Parameter) -> int:
        """This rank's number among those that share a parameter, which upstream asks for each gradient."""
        group, known = self._get_param_partition_group(param), self.__dict__.setdefault("_ranks_of_groups", {})
        if group not in known:
            known[group] = super()._get_param_partition_rank(param)  # type: ignore[misc]
        return known[group]

    def get_param_comm_dtype(self: Any, param: nn.Parameter) -> torch.dtype:
        """Reduce a gradient in its own dtype, unless the config names one for all."""
        accumulation = self.gradient_accumulation
        own = accumulation.wire_dtypes.own(accumulation.index[id(param)])
        return super().get_param_comm_dtype(param) if own is None else own  # type: ignore[misc]

    def _step_within(self: Any, closure: Callable[[], Any] | None) -> Any:
        with self.gradient_accumulation.all_whole.step(), without_statistics():
            return super()._step_within(closure)

    def _post_step(self: Any, *args: Any) -> None:
        """Gather the weights that stay gathered by few collectives, and leave the rest to upstream: one each."""
        accumulation = self.gradient_accumulation
        if accumulation.updates is not None and accumulation.engine.compilation is None:
            accumulation.updates.run()
        persistent = [param for param in self.persistent_parameters if param.ds_status is _RELEASED]
        if persistent and not any(map(is_special, persistent)):
            with faster_gathers(), torch.no_grad():
                for handle in [each[0].all_gather_coalesced(each) for each in collectives(persistent, forward=True)]:
                    handle.wait()
        super()._post_step(*args)

    def _optimizer_step(self: Any, sub_group_id: int) -> None:
        """Note what the torch optimizer reads: its gradient, unscaled and clipped. On NVMe it has no place to stay."""
        if not self._swappable_optimizer_subgroup(sub_group_id):
            flat = self.fp32_partitioned_groups_flat[sub_group_id]
            self.gradient_accumulation.note_read(lambda: [(sub_group_id, flat.grad)])
        super()._optimizer_step(sub_group_id)  # type: ignore[misc]

    def unscale_and_clip_grads(self: Any, sub_group_id: int, total_norm: Tensor) -> None:
        """Clip by value after upstream has unscaled."""
        super().unscale_and_clip_grads(sub_group_id, total_norm)
        self.gradient_accumulation.clip_by_value(self.fp32_partitioned_groups_flat[sub_group_id].grad)

    def _prepare_fp32_grad_for_sub_group(self: Any, sub_group_id: int) -> None:
        """Let the optimizer read the gradients where they lie: upstream makes one tensor of them, and they are one."""
        flat, upstream = as_one(self.averaged_gradients[sub_group_id]), self.flatten
        if flat is not None:
            self.flatten = lambda _: flat
        try:
            super()._prepare_fp32_grad_for_sub_group(sub_group_id)  # type: ignore[misc]
        finally:
            self.flatten = upstream
