"""Gradient accumulation of ZeRO stage 3 (``DeepSpeedZeroOptimizer_Stage3``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import IPGBucketZ3
from torch import Tensor, nn

from lightning_zeroplus.engine.accumulation import GradientAccumulation
from lightning_zeroplus.engine.families.masters import share_memory, take_over
from lightning_zeroplus.engine.families.zero3_overrides import Zero3Overrides
from lightning_zeroplus.engine.gathering.gathers import Gathers
from lightning_zeroplus.engine.gathering.in_step import KeepsLockstep
from lightning_zeroplus.engine.gathering.resident import stays
from lightning_zeroplus.engine.hooks.received import TakesWholeGradients
from lightning_zeroplus.engine.optimizer.chain import name_of
from lightning_zeroplus.engine.optimizer.kept import Kept
from lightning_zeroplus.engine.optimizer.owned_steps import OwnedSteps
from lightning_zeroplus.engine.reduction.buckets import BucketsByDtype
from lightning_zeroplus.engine.reduction.exchange import Exchange, Piece, by_parameters
from lightning_zeroplus.engine.reduction.streams import streams_matter
from lightning_zeroplus.engine.reduction.whole_parameters import AveragesParameters
from lightning_zeroplus.engine.reduction.wire_dtypes import sum_dtype_of
from lightning_zeroplus.gradients.shown import write_plain
from lightning_zeroplus.weights.partitioned.access import WatchedParameter
from lightning_zeroplus.weights.partitioned.partition import take_over_written


class Zero3Accumulation(AveragesParameters, KeepsLockstep, TakesWholeGradients, GradientAccumulation):
    """Every backward reduce-scatters into the partitions, or defers.

    Attributes:
        reduced: ``ds_id`` of the parameters whose partition holds a gradient of the current step.
        all_whole: While all weights are whole.
        updates: Updates the weights that stay after a step; None: upstream does it.
    """

    mixin = Zero3Overrides
    partitions_parameters = True

    def __init__(self, engine: Any, optimizer: Any, *args: Any) -> None:
        self.reduced: set[int] = set()
        self._leaf_params = {id(param) for params in optimizer.leaf_parameters.values() for param in params}
        self._postponed: dict[int, Any] = {}
        self._ends_backward = False
        super().__init__(engine, optimizer, *args)
        vars(optimizer).setdefault("_offload_boundary_param_ids", set())  # releases that offload in the step have none
        self._index_by_ds_id = {param.ds_id: index for index, param in enumerate(self.params)}  # type: ignore[attr-defined]
        self.take_whole_gradients()
        optimizer.set_gradient_accumulation_boundary(False)
        if optimizer.reduce_scatter and optimizer.dtype is torch.float32 and get_accelerator().is_synchronized_device():
            # A reduce-scatter copies all gradients of a bucket together. That they lie together before spares the
            # allocator of a GPU, and on the CPU nothing: upstream would copy each of them once more.
            optimizer.contiguous_gradients = False
        optimizer.ipg_buckets = BucketsByDtype(self._make_bucket)
        self.spare_hooks(optimizer._grad_acc_hooks)
        self._begin_hooks(optimizer._grad_acc_hooks)
        self._begin_lockstep(Gathers(optimizer.parameter_offload, engine.module))
        self.all_whole, self.updates = self._gathers.all_whole, self._gathers.updates
        self._apart = [pair for pair in self._masters() if not share_memory(*pair)]

    def _optimized_params(self) -> Iterable[nn.Parameter]:
        return chain.from_iterable(self.optimizer.fp16_groups)

    def _sums_in_grads(self) -> Mapping[int, nn.Parameter] | None:
        if streams_matter():
            return None
        params = ((index, self.params[index]) for index in sorted(self.optimized))
        return {index: param for index, param in params if stays(param) and id(param) not in self._leaf_params} or None

    def _masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's master weights of each group, and the partitions of the module's weights; not what is on NVMe."""
        optimizer = self.optimizer
        for index, weights in enumerate(optimizer.fp16_partitioned_groups_flat):
            if weights is not None and not optimizer._swappable_optimizer_subgroup(index):
                yield optimizer.fp32_partitioned_groups_flat[index], weights

    def before_step(self, part: int | None = None) -> bool:
        if self.engine.meets_before_steps:
            self.sync()
        self._gathers.release()
        return super().before_step(part)

    def hold(self, held: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        # What is held on the host follows nothing: under DDP, too, weights get other memory when they go to a GPU.
        self._gathers.hold((param, memory) for param, memory in held if memory.device == self.engine.device)

    def hold_again(self) -> None:
        super().hold_again()
        self._gathers.hold_again()

    def take_written_weights(self) -> None:
        take_over_written(self.params, self._gathers.held.memory)
        for master, weights in self._apart:
            take_over(master, weights)

    def count_update(self, indices: Iterable[int]) -> None:
        updated = list(indices)
        params = [param for index in updated if isinstance(param := self.params[index], WatchedParameter)]
        kept = [param for param in params if not param.is_written()]
        super().count_update(updated)
        for param in kept:  # else the next step would take it for one that the user has written, and copy it
            param.note_kept()

    def step_whole_tensors(self) -> None:
        optimizer = self.optimizer
        name = name_of(optimizer.optimizer)
        if optimizer.swap_optimizer:
            raise ValueError(f"`{name}` needs whole tensors, and its states are on NVMe. Offload them to the CPU.")
        if optimizer.use_muon:
            raise ValueError(f"DeepSpeed's `{name}` is not supported at ZeRO stage 3. Use `torch.optim.Muon`.")
        self.split_steps = OwnedSteps(
            lambda: self.torch_optimizer,
            self._stretches,
            self.params,
            self._owned_pieces(),
            self._process_group(),
            self.engine.device,
            optimizer.reduce_bucket_size,
        )

    def _make_bucket(self, dtype: torch.dtype) -> IPGBucketZ3:
        bucket = IPGBucketZ3()
        if self.optimizer.contiguous_gradients:
            device = get_accelerator().current_device_name()
            bucket.buffer = torch.empty(self.optimizer.reduce_bucket_size, dtype=dtype, device=device)
        return bucket

    def close(self) -> None:
        super().close()
        self._gathers.close()
        self._end_lockstep()
        self.leave_whole_gradients()

    def _hooks_reduce(self) -> bool:
        return True

    def postpone(self, param: Any) -> bool:
        """Whether the gradient is not complete yet, and will be reduced at the end of the backward.

        Upstream reduces the parameters of a leaf module in the module's backward hook, with zeros where there is no
        gradient. Autograd may run that hook before it has accumulated a single one of them: what comes later is lost
        unless, by chance, the zeros still lie in a bucket that has not been reduced.
        """
        if self._ends_backward or id(param) not in self._leaf_params:
            return False
        if param.grad is not None and param.grad.numel() != param.ds_numel:
            param.grad = None  # zeros like the parameter, which is partitioned again by now, and so empty
        # With the others of its module: another rank may have used those.
        for other in self.optimizer.leaf_parameters[param.ds_z3_leaf_module]:
            self._postponed[id(other)] = other
        return True

    def is_reduced_by_all(self, index: int) -> bool:
        return id(self.params[index]) not in self._leaf_params

    def arrived(self, param: Any) -> bool:
        return super().arrived(param) or id(param) in self._leaf_params

    def gradient_hook(self, param: nn.Parameter) -> None:
        self.optimizer.reduce_ready_partitions_and_remove_grads(param)

    def _outlives_hook(self, index: int, param: Any) -> bool:
        return (
            self.local_sums.defers(index)
            or id(param) in self._leaf_params
            or not self.optimizer.contiguous_gradients
            or param.ds_numel > self.optimizer.reduce_bucket_size
        )

    def index_by_id(self, id_: int) -> int:
        return self._index_by_ds_id[id_]

    def _left_for_the_end(self) -> list[int]:
        """What else is reduced at the end of the backward, in a sequence of numbers."""
        return sorted(self.index[key] for key in self._postponed)

    def _in_bucket(self, dtype: torch.dtype) -> list[nn.Parameter]:
        return self.optimizer.ipg_buckets[dtype].params

    def _emptied_buckets(self) -> Iterator[tuple[int, Tensor]]:
        get_accelerator().synchronize()  # with the streams that have filled them
        for bucket in self.optimizer.ipg_buckets.values():
            for param in bucket.params:
                yield self.index[id(param)], param.grad
                param.grad = None
            bucket.clear_params()

    def _fill_with_zeros(self, index: int, dtype: torch.dtype) -> None:
        param: Any = self.params[index]
        self._have_zeros(param, dtype)
        self.optimizer.put_into_bucket(param)

    def _have_zeros(self, param: Any, dtype: torch.dtype) -> None:
        zeros = torch.zeros(param.ds_shape, dtype=dtype, device=self.engine.device)
        with self.full_shape(param):
            param.grad = zeros

    def reduce_buckets(self, dtype: torch.dtype | None = None) -> None:
        buckets = self.optimizer.ipg_buckets
        filled = sorted((each for each, bucket in buckets.items() if bucket.params), key=str)
        for each in filled if dtype is None else [dtype]:
            self.optimizer._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(each)

    def before_epilogue(self) -> None:
        super().before_epilogue()
        if self.local_sums.diverged or self.local_sums.defers_all:
            for key, param in self._postponed.items():
                self.local_sums.add(self.index[key], param)
            self._postponed.clear()
            return
        self._ends_backward = True
        before = set(self.averaged)
        leaves = [self.index[id(param)] for param in self._postponed.values()]
        here = {index for index in leaves if self.params[index].grad is not None}
        presence = self.present_somewhere(leaves, here)
        try:
            for param in self._postponed.values():
                if param.grad is None:
                    self._have_zeros(param, sum_dtype_of(param))
                self.optimizer.reduce_ready_partitions_and_remove_grads(param)
            self._postponed.clear()
            # Those that have only zeros have no gradient.
            zeros = set(leaves) - presence.result() - before
            self.averaged |= set(leaves) - zeros
        finally:
            self._ends_backward = False

    def _storage_dtype(self) -> torch.dtype:
        return self.optimizer.gradient_accumulation_dtype

    def reduce(self, members: frozenset[int]) -> None:
        optimizer = self.optimizer
        sums = self.local_sums.sums
        group = optimizer.dp_process_group
        presence = self.present_somewhere(members, sums)
        rank = dist.get_rank(group=group)
        ordered = [param for params in optimizer.fp16_groups for param in params if self.index[id(param)] in members]
        wire_dtypes = self.wire_dtypes.agreed(members)
        by_dtype: dict[torch.dtype, list[Any]] = {}
        for param in ordered:
            by_dtype.setdefault(wire_dtypes[self.index[id(param)]], []).append(param)
        for dtype in sorted(by_dtype, key=str):
            exchange = Exchange(group, dtype, self.engine.device, optimizer.reduce_scatter)
            owned = (self._pieces(param, dist.get_world_size(group=group)) for param in by_dtype[dtype])
            for bucket in by_parameters(owned, optimizer.reduce_bucket_size):
                averages = exchange.average(bucket, sums, by_parameters=True)
                optimizer.partition_grads(
                    [self.params[piece.param] for piece in bucket[rank]], [average for _, average in averages]
                )
                for piece in bucket[rank]:
                    sums.pop(piece.param, None)
        if optimizer.offload_optimizer and streams_matter():
            get_accelerator().current_stream().synchronize()  # the host reads next what is being copied to it
        self.averaged |= presence.result()

    def finalize(self) -> None:
        optimizer = self.optimizer
        self.reduce_if_needed()
        if not optimizer.offload_optimizer and not optimizer.averaged_gradients:
            optimizer.independent_gradient_partition_epilogue()  # gradients were assigned without any backward
        for index, group in enumerate(optimizer.fp16_groups):
            for position, param in enumerate(group):
                if param.ds_id not in self.reduced:
                    self._zero_stale_partition(index, position, param)
                elif not optimizer.offload_optimizer:
                    # Upstream has put zeros there if the parameter was frozen during the last backward.
                    optimizer.averaged_gradients[index][position] = self._partition(param)
        optimizer.finalize_gradient_accumulation_boundary()

    def _partition(self, param: Any) -> Tensor:
        """Where this rank accumulates its part of a parameter's gradient; the last rank's may be padded."""
        return self.optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[param.ds_id]

    def _owned_pieces(self) -> Sequence[Sequence[Piece]]:
        world_size = dist.get_world_size(group=self.optimizer.dp_process_group)
        by_param = (self._pieces(param, world_size) for param in self._optimized_params())
        return [list(pieces) for pieces in zip(*by_param, strict=True)]

    def _slot(self, piece: Piece) -> Tensor:
        param: Any = self.params[piece.param]
        if piece.numel:
            if param.ds_id not in self.reduced:
                self._partition(param).zero_()  # what is there is of an earlier step
            self.reduced.add(param.ds_id)
            self.optimizer._offload_boundary_param_ids.add(param.ds_id)
        return self._partition(param).view(-1).narrow(0, 0, piece.numel)

    def _part_read(self, index: int, read: Mapping[int, Tensor]) -> Tensor | None:
        param = self.params[index]
        group, offset, _ = self.optimizer.grad_position[self.optimizer.get_param_id(param)]
        ranks = self._process_group()
        own = self._pieces(param, dist.get_world_size(group=ranks))[dist.get_rank(group=ranks)]
        return read[group].view(-1).narrow(0, int(offset), own.numel) if own.numel else None

    def _restore(self, kept: Mapping[int, Kept]) -> None:
        # In fp32 the step reads gradients where they lie: what is kept is the partition.
        self.reduced |= {self.params[index].ds_id for index, there in kept.items() if there is not None}  # type: ignore[attr-defined]
        super()._restore(kept)

    def _zero_stale_partition(self, index: int, position: int, param: nn.Parameter) -> None:
        # Upstream never clears the partition of a parameter without a gradient: that of an earlier step would count in
        # the norm.
        optimizer = self.optimizer
        if not optimizer.offload_optimizer:
            optimizer.averaged_gradients[index][position].zero_()
        elif not optimizer._swappable_optimizer_subgroup(index):
            _, offset, numel = optimizer.grad_position[optimizer.get_param_id(param)]
            optimizer.fp32_partitioned_groups_flat[index].grad.narrow(0, offset, numel).zero_()

    def _forget(self, indices: Iterable[int]) -> None:
        super()._forget(indices)
        for index in indices:
            self._postponed.pop(id(self.params[index]), None)
        self._part_with(indices)

    def _has_partition(self, index: int) -> bool:
        """Whether this rank keeps a part of the parameter's averaged gradient."""
        return self.params[index].ds_id in self.reduced  # type: ignore[attr-defined]

    def _part_with(self, indices: Iterable[int]) -> None:
        """Drop what this rank keeps of some parameters' averaged gradients."""
        for param in map(self.params.__getitem__, indices):
            self.reduced.discard(param.ds_id)  # type: ignore[attr-defined]
            self.optimizer._offload_boundary_param_ids.discard(param.ds_id)  # type: ignore[attr-defined]

    def total_norm(self) -> Tensor:
        return self.optimizer.norm_of_averages()

    def discard(self) -> None:
        super().discard()
        self.reduced.clear()
        self._postponed.clear()
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

    def _zero_grad_in_step(self) -> None:
        """Gradients lie in partitions, and no ``param.grad`` is left."""

    def _base_zero_grad(self) -> None:
        if get_accelerator().is_synchronized_device():
            # Upstream records the current stream on every gradient it finds, and the CPU has no stream.
            for group in self.optimizer.fp16_groups:
                for param in group:
                    write_plain(param, None)
        super()._base_zero_grad()

    def retained_graph(self) -> AbstractContextManager[None]:
        return self._gathers.again()
