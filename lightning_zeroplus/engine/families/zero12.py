"""Gradient accumulation of ZeRO stages 1 and 2 (``DeepSpeedZeroOptimizer``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from lightning_zeroplus.engine.accumulation import GradientAccumulation
from lightning_zeroplus.engine.families.masters import Homes, note_masters, share_memory, take_over
from lightning_zeroplus.engine.families.zeroes import ZeroOverrides, zero_stale_offloaded
from lightning_zeroplus.engine.gathering.after_step import GathersWeights
from lightning_zeroplus.engine.optimizer.whole_steps import WholeSteps
from lightning_zeroplus.engine.reduction.exchange import Bucket, Exchange, Piece, stretches
from lightning_zeroplus.engine.reduction.overlapped import StreamSafeReduction, make_stream_safe
from lightning_zeroplus.engine.reduction.streams import streams_matter
from lightning_zeroplus.engine.reduction.wire_dtypes import sum_dtype_of
from lightning_zeroplus.gradients.ranks import gloo
from lightning_zeroplus.weights.trainable import made_trainable


class _Zero12Overrides(StreamSafeReduction, ZeroOverrides, GathersWeights):
    """Overrides on ``DeepSpeedZeroOptimizer``; each calls ``super()``."""

    def independent_gradient_partition_epilogue(self: Any) -> None:
        """Skip the epilogue of a backward that gave no parameter a gradient.

        Upstream indexes the bucket buffers there, which ``setup_buckets()`` makes in the first gradient hook.
        """
        if self.ready_for_gradients:
            with self.without_host_waits():
                super().independent_gradient_partition_epilogue()  # type: ignore[misc]

    def process_gradients(self: Any, param: nn.Parameter, i: int) -> None:
        """Upstream's gradient hook: put the gradient into a bucket, unless it is deferred."""
        accumulation = self.gradient_accumulation
        if accumulation.arrived(param) and not accumulation.take(param):
            accumulation.begin_filling(param)
            self.put_into_bucket(param, i)
            accumulation.end_filling()

    def reduce_ipg_grads(self: Any, comm_dtype: torch.dtype | None = None) -> None:
        """Reduce the buckets if they are the same on all ranks."""
        accumulation = self.gradient_accumulation
        reduce = accumulation.reduce_where_they_lie if accumulation.needs_no_buffer else super().reduce_ipg_grads
        accumulation.flush_full(comm_dtype, lambda: reduce(comm_dtype))

    def get_param_comm_dtype(self: Any, param: nn.Parameter) -> torch.dtype:
        """The gradient's own dtype, unless the config names one for all reductions."""
        accumulation = self.gradient_accumulation
        own = accumulation.wire_dtypes.own(accumulation.index[id(param)])
        return super().get_param_comm_dtype(param) if own is None else own  # type: ignore[misc]

    def async_accumulate_grad_in_cpu_via_gpu(self: Any, param: nn.Parameter) -> None:
        """Copy a parameter's first gradient of a step to the CPU, and add later ones.

        Upstream decides by ``micro_step_id``, a count of backwards: the gradient of a parameter that is first used in
        the second backward would be added to the gradient of the previous step.
        """
        count = self.micro_step_id
        first = self.get_param_id(param) not in self._offload_accumulated_param_ids
        self.micro_step_id = 0 if first else max(count, 1)
        try:
            super().async_accumulate_grad_in_cpu_via_gpu(param)  # type: ignore[misc]
        finally:
            self.micro_step_id = count

    def _use_compact_grad_partition_buffer(self: Any, group_idx: int) -> bool:
        """Always keep this rank's gradients in one flat buffer, which ``step()`` uses without a copy.

        Upstream does so only for fp32 accumulation of low-precision gradients, and otherwise copies them twice more.
        Under offload upstream decides: the buffer would stay on the device.
        """
        return not self.cpu_offload or super()._use_compact_grad_partition_buffer(group_idx)  # type: ignore[misc]

    def _optimizer_step(self: Any, group_no: int) -> None:
        """Note what the torch optimizer reads: its gradient, unscaled and clipped."""
        self.gradient_accumulation.note_read(lambda: [(group_no, self.single_partition_of_fp32_groups[group_no].grad)])
        groups = self.optimizer.param_groups
        try:
            super()._optimizer_step(group_no)  # type: ignore[misc]
        finally:
            self.optimizer.param_groups = groups  # a step that raises leaves one of them

    def unscale_and_clip_grads(self: Any, grad_groups_flat: list[Tensor], total_norm: Tensor) -> None:
        """Clip by value after upstream has unscaled."""
        super().unscale_and_clip_grads(grad_groups_flat, total_norm)
        self.gradient_accumulation.clip_by_value(*grad_groups_flat)


class Zero12Accumulation(GradientAccumulation):
    """Stage 2 reduces through upstream's hooks, or defers; stage 1 always defers.

    Relies on upstream: its hooks add this rank's partition of the averaged gradients to a flat buffer. Under offload,
    with the accumulation boundary False, they add to buffers on the CPU. ``finalize_gradient_accumulation_boundary()``
    turns the sum into what ``step()`` reads. :meth:`reduce` adds to the same buffers.

    Attributes:
        needs_no_buffer: The gradients of a bucket stay where they are until it is reduced. On gloo they are written
            once then, to the parts of the ranks that own them. Upstream copies them to a buffer, and all-reduces that.
        averages_in_place: On a device, a full bucket is averaged where it lies.
    """

    mixin = _Zero12Overrides

    def __init__(self, engine: Any, optimizer: Any, *args: Any) -> None:
        super().__init__(engine, optimizer, *args)
        optimizer.set_gradient_accumulation_boundary(False)
        own = self.hooks_reduce and optimizer.reduce_scatter and not (optimizer.cpu_offload or optimizer.has_moe_layers)
        on_gloo = gloo.suits(optimizer.dp_process_group, engine.device) and not optimizer.overlap_comm
        self.needs_no_buffer = own and on_gloo and not streams_matter()
        self.averages_in_place = own and streams_matter() and optimizer.contiguous_gradients
        if self.needs_no_buffer:
            optimizer.contiguous_gradients = False
        self.spare_hooks(optimizer._grad_acc_hooks)
        self._begin_hooks(optimizer._grad_acc_hooks)
        self._order_streams()
        self._owned, self._places = self._layout()
        self._own_pieces = {piece.param: piece for piece in self._own(range(len(self.params)))}
        self._group_of = {id(param): at for at, group in enumerate(optimizer.bit16_groups) for param in group}
        self._index_by_id = {key: self.index[param] for param, key in optimizer.param_id.items() if param in self.index}
        names = {param: name for name, param in engine.module.named_parameters()}
        params = list(self._optimized_params())
        self._homes = Homes(params, [names[param] for param in params])
        self._apart = [pair for pair in self._masters() if not share_memory(*pair)]
        note_masters(optimizer, params, anew=len(self._apart) < len(optimizer.bit16_groups))

    def _optimized_params(self) -> Iterable[nn.Parameter]:
        return chain.from_iterable(self.optimizer.bit16_groups)

    def _masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's master weights of each group, with the module's memory for the same weights."""
        optimizer = self.optimizer
        for master, weights, group in zip(
            optimizer.single_partition_of_fp32_groups,
            optimizer.parallel_partitioned_bit16_groups,
            optimizer.real_dp_process_group,
            strict=True,
        ):
            yield master, weights[dist.get_rank(group=group)]

    def is_overwritten(self, index: int) -> bool:
        optimizer, param = self.optimizer, self.params[index]
        filled = {param_id for bucket in optimizer.ipg_buckets.values() for *_, param_id in bucket.params}
        return optimizer.get_param_id(param) not in filled

    def take_written_weights(self) -> None:
        self._homes.bring_back()
        for master, weights in self._apart:
            take_over(master, weights)

    def step_whole_tensors(self) -> None:
        self.split_steps = WholeSteps(
            lambda: self.torch_optimizer, self._stretches, self.params, self._owned, self._process_group()
        )

    def follow_weights(self) -> None:
        self._homes.follow()

    def _order_streams(self) -> None:
        make_stream_safe(self.optimizer, self.engine.bucket_buffers)

    def _hooks_reduce(self) -> bool:
        return bool(self.optimizer.partition_gradients)

    def _sums_in_grads(self) -> Mapping[int, nn.Parameter] | None:
        # Upstream moves ``param.grad`` to an attribute, at the end of a backward, if it is to have another dtype.
        if streams_matter() or self.optimizer.use_grad_accum_attribute:
            return None
        return {index: self.params[index] for index in sorted(self.optimized)}

    def gradient_hook(self, param: nn.Parameter) -> None:
        self.optimizer.process_gradients(param, self._group_of[id(param)])

    def _outlives_hook(self, index: int, param: nn.Parameter) -> bool:
        optimizer = self.optimizer
        stays = not optimizer.contiguous_gradients or param.numel() > optimizer.reduce_bucket_size
        return stays or self.local_sums.defers(index)

    def index_by_id(self, id_: int) -> int:
        return self._index_by_id[id_]

    def _in_bucket(self, dtype: torch.dtype) -> list[nn.Parameter]:
        groups = self.optimizer.bit16_groups
        return [groups[group][position] for group, position, _ in self.optimizer.ipg_buckets[dtype].params]

    def _emptied_buckets(self) -> Iterator[tuple[int, Tensor]]:
        optimizer = self.optimizer
        get_accelerator().synchronize()  # wait for the streams that have filled the buckets
        for dtype, bucket in optimizer.ipg_buckets.items():
            for param in self._in_bucket(dtype):
                yield self.index[id(param)], optimizer.get_gradient_for_reduction(param)
                optimizer.clear_grad_attribute(param)
            bucket.clear()
        optimizer.extra_large_param_to_reduce.clear()

    def _fill_with_zeros(self, index: int, dtype: torch.dtype) -> None:
        param = self.params[index]
        param.grad = torch.zeros_like(param, dtype=dtype)
        self.optimizer.put_into_bucket(param, self._group_of[id(param)])

    def reduce_buckets(self, dtype: torch.dtype | None = None) -> None:
        if self.optimizer.ready_for_gradients:  # else there are no buckets: no gradient has been put into one
            self.optimizer.reduce_ipg_grads(dtype)

    def own_parts(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Where this rank's parts of a reduced bucket go, and the parts."""
        slots, parts, at = [], [], 0
        for param in self._in_bucket(flat.dtype):
            if (piece := self._own_pieces.get(self.index[id(param)])) is not None:
                slots.append(self._slot(piece))
                parts.append(flat.narrow(0, at + piece.start, piece.numel))
            at += param.numel()
        return slots, parts

    def reduce_where_they_lie(self, dtype: torch.dtype | None = None) -> None:
        """Reduce the bucket of ``dtype``, or all, in place of upstream, into this rank's partition."""
        optimizer = self.optimizer
        chosen = optimizer.ipg_buckets if dtype is None else [dtype]
        for each in sorted((each for each in chosen if optimizer.ipg_buckets[each].params), key=str):
            params = self._in_bucket(each)
            grads = {self.index[id(param)]: optimizer.get_gradient_for_reduction(param) for param in params}
            owned = [[piece for piece in pieces if piece.param in grads] for pieces in self._owned]
            exchange = Exchange(optimizer.dp_process_group, each, self.engine.device, True)
            with torch.no_grad():
                self._average_into_partition(exchange, owned, grads, False)
            for param in params:
                optimizer.clear_grad_attribute(param)
            optimizer.ipg_buckets[each].clear()

    def _storage_dtype(self) -> torch.dtype:
        return self.optimizer.gradient_accumulation_dtype

    def _layout(self) -> tuple[list[list[Piece]], dict[int, tuple[int, int, int]]]:
        """Where the partitions lie.

        Returns:
            The pieces of each rank's partition, in order. For each parameter with a piece in this rank's partition: the
            group, the first element of the piece, and the offset of the piece in the group's partition.
        """
        optimizer = self.optimizer
        this_rank = dist.get_rank(group=optimizer.dp_process_group)
        owned: list[list[Piece]] = [[] for _ in range(dist.get_world_size(group=optimizer.dp_process_group))]
        places = {}
        for group, params in enumerate(optimizer.round_robin_bit16_groups):
            for param in params:
                key, index = optimizer.get_param_id(param), self.index[id(param)]
                for rank in optimizer.param_to_partition_ids[group][key]:
                    start = int(optimizer.grad_start_offset[group][rank][key])
                    offset = int(optimizer.grad_partition_insertion_offset[group][rank][key])
                    owned[rank].append(
                        Piece(index, start, min(param.numel() - start, int(optimizer.partition_size[group]) - offset))
                    )
                    if rank == this_rank:
                        places[index] = (group, start, offset)
        return owned, places

    def end_backward(self) -> None:
        if not (self.hooks_reduce or self.local_sums.lie_in_grads):
            for index in sorted(self.optimized):  # at stage 1, upstream has no hooks if gradients are not contiguous
                self.local_sums.add(index, self.params[index])
        super().end_backward()

    def finalize(self) -> None:
        optimizer = self.optimizer
        self.reduce_if_needed()
        if optimizer.cpu_offload:
            zero_stale_offloaded(optimizer)
        with made_trainable(self.params[index] for index in self.averaged):  # some may be frozen since their backward
            optimizer.finalize_gradient_accumulation_boundary()

    def _owned_pieces(self) -> Sequence[Sequence[Piece]]:
        return self._owned

    def _flat_partition(self, group: int) -> Tensor | None:
        """This rank's averaged gradients of a group, flat, as the step reads them; None if it reads them elsewhere."""
        if not self.optimizer._use_compact_grad_partition_buffer(group):
            return None
        flat: Tensor = self.optimizer._get_compact_grad_partition_buffer(group).flat_partition
        return flat

    def _slot(self, piece: Piece) -> Tensor:
        optimizer = self.optimizer
        group, start, offset = self._places[piece.param]
        if (flat := self._flat_partition(group)) is not None:
            return flat.narrow(0, offset + piece.start - start, piece.numel)
        key = optimizer.get_param_id(self.params[piece.param])
        if key not in optimizer._offload_accumulated_param_ids:  # the buffer has the gradient of an earlier step
            param = self.params[piece.param]
            zeros = torch.zeros(param.numel(), dtype=param.dtype, device=optimizer.device)
            optimizer.accumulated_grads_in_cpu[key] = zeros
            optimizer._offload_accumulated_param_ids.add(key)
        return optimizer.accumulated_grads_in_cpu[key].view(-1).narrow(0, piece.start, piece.numel)

    def _part_read(self, index: int, read: Mapping[int, Tensor]) -> Tensor | None:
        if index not in self._places:
            return None
        group, _, offset = self._places[index]
        (piece,) = self._own((index,))
        return read[group].view(-1).narrow(0, offset, piece.numel)

    def total_norm(self) -> Tensor:
        return self.optimizer.norm_of_averages()

    def reduce(self, members: frozenset[int]) -> None:
        optimizer = self.optimizer
        sums = self.local_sums.sums
        presence = self.present_somewhere(members, sums)
        mine = sorted(members & self._places.keys()) if optimizer.cpu_offload else []
        wire_dtypes = self.wire_dtypes.agreed(members)
        # At stage 2 ranks that differ may have reduced some, without having told each other.
        is_empty = not self.hooks_reduce and self.averaged.isdisjoint(members)
        for index in mine:
            # Another rank may have a gradient where this one has none; its average lands here.
            if index not in sums:
                sums[index] = torch.zeros_like(self.params[index], dtype=sum_dtype_of(self.params[index]))
        left = Counter({index: self.params[index].numel() for index in members})
        for dtype in sorted(set(wire_dtypes.values()), key=str):
            exchange = Exchange(optimizer.dp_process_group, dtype, self.engine.device, optimizer.reduce_scatter)
            owned = [[piece for piece in pieces if wire_dtypes.get(piece.param) == dtype] for pieces in self._owned]
            for bucket in exchange.cut(owned, optimizer.reduce_bucket_size):
                self._average_into_partition(exchange, bucket, sums, is_empty)
                for piece in chain.from_iterable(bucket):
                    left[piece.param] -= piece.numel
                    if not left[piece.param] and not optimizer.cpu_offload:
                        sums.pop(piece.param, None)
        for index in mine:
            self._add_to_offloaded(index)
        for index in members:
            sums.pop(index, None)
        self.averaged |= presence.result()

    def _average_into_partition(
        self, exchange: Exchange, bucket: Bucket, grads: Mapping[int, Tensor], is_empty: bool
    ) -> None:
        """Add averages to this rank's partition, or make them there if it ``is_empty``. Stretches are added at once."""
        found = list(stretches(bucket[dist.get_rank(group=self.optimizer.dp_process_group)], self._places))
        if is_empty and exchange.needs_no_padding and len(found) == 1:
            group, there, _, numel, _ = found[0]
            flat = self._flat_partition(group)
            if flat is not None and (flat.dtype, flat.device) == (exchange.dtype, self.engine.device):
                return exchange.average_into(flat.narrow(0, there, numel), bucket, grads)
        averages = exchange.average_own(bucket, grads)
        slots, parts = list[Tensor](), list[Tensor]()
        for group, there, here, numel, members in found:
            average, flat = averages.narrow(0, here, numel), self._flat_partition(group)
            if flat is not None:
                parts.append(average.to(flat.device, flat.dtype))
                slots.append(flat.narrow(0, there, numel))
            else:
                for own, part in zip(members, average.split([own.numel for own in members]), strict=True):
                    self.local_sums.sums[own.param].view(-1).narrow(0, own.start, own.numel).copy_(part)
        if slots:
            torch._foreach_add_(slots, parts)

    def _add_to_offloaded(self, index: int) -> None:
        optimizer, param = self.optimizer, self.params[index]
        if optimizer.use_grad_accum_attribute:
            param.grad_accum = self.local_sums.sums[index]  # type: ignore[attr-defined]
        else:
            param.grad = self.local_sums.sums[index]
        optimizer.copy_grads_in_partition(param, self._places[index][0])
        optimizer.clear_grad_attribute(param)

    def _forget(self, indices: Iterable[int]) -> None:
        super()._forget(indices)
        for piece in self._own(self.averaged.intersection(indices)):
            self._slot(piece).zero_()
        if self.optimizer.cpu_offload:
            there: set[Any] = getattr(self.optimizer, "_offload_accumulated_param_ids", set())
            there -= {self.optimizer.get_param_id(self.params[index]) for index in indices & self._places.keys()}

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
        # Upstream copies the flag from the engine at the end of a backward only; hooks of the first backward read it.
        optimizer.set_gradient_accumulation_boundary(False)
        if optimizer.cpu_offload:
            optimizer._offload_accumulated_param_ids = set()
            optimizer.reset_cpu_buffers()
