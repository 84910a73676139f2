"""Bucket reduction of ZeRO 1 and 2 that is safe for gradients from any number of streams.

Upstream copies gradients into a bucket on whatever streams autograd runs their hooks. It reduces a full bucket on a
stream of its own, while the next bucket, in another physical buffer, is filled. Two orders are needed, and no others: a
reduction comes after *every* copy into its bucket, and *every* copy into a physical buffer comes after the buffer's
previous reduction. Upstream ensures both, by an event for each gradient, for CPU offload only. Otherwise only the
stream that is current when a bucket is full waits for the reduction, which makes the compute stream wait for
communication. Here both orders always hold, and that wait is removed. Where a bucket is averaged in place, each stream
that copies into it is waited for once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import IPGBucket
from torch import Tensor

from lightning_zeroplus.engine.reduction.buckets import BucketsByDtype, FillsBuckets
from lightning_zeroplus.engine.reduction.host_waits import WaitsOnDevice
from lightning_zeroplus.engine.reduction.streams import PARTITION, streams_matter


class RotatingBucket(IPGBucket):
    """A bucket with any number of physical buffers that take turns; upstream swaps between two.

    Attributes:
        allocated_on: The stream that the allocator gives the buffers back to.
    """

    allocated_on: Any = None
    _index = 0

    @property
    def index(self) -> int:
        """The buffer that is being filled."""
        return self._index

    @index.setter
    def index(self, value: Any) -> None:
        # Upstream assigns 0 for new buffers, and 1 - index to go on to the next.
        count = len(self.__dict__.get("buffer", ()))
        self._index = (self._index + 1) % count if count > 1 else 0


class StreamSafeReduction(FillsBuckets):
    """Overrides on ``DeepSpeedZeroOptimizer``; each calls ``super()``."""

    bucket_buffers: int = 2

    def setup_buckets(self: Any) -> None:
        """Allocate ``bucket_buffers`` buffers per bucket, in the dtype in which the bucket is reduced.

        Upstream allocates one buffer, or two to overlap, in the parameters' dtype, in which fp32 gradients would be
        rounded.
        """
        fresh = not self.ready_for_gradients
        super().setup_buckets()  # type: ignore[misc]
        if fresh:
            for dtype, bucket in self.ipg_buckets.items():
                self._allocate(bucket, dtype)

    def _allocate(self: Any, bucket: RotatingBucket, dtype: torch.dtype) -> None:
        if not self.contiguous_gradients:
            return
        bucket.allocated_on = get_accelerator().current_stream()
        if bucket.buffer and bucket.buffer[0].dtype != dtype:
            bucket.buffer.clear()
        while len(bucket.buffer) < (self.bucket_buffers if self.overlap_comm else 1):
            size = int(self.reduce_bucket_size)
            bucket.buffer.append(torch.empty(size, dtype=dtype, device=get_accelerator().current_device_name()))

    def _release_ipg_buffers(self: Any) -> None:
        """Give the buffers back in the order of streams: whoever gets their memory comes after their reduction.

        If their use by the reduction stream was recorded instead, the allocator would keep them until the device is
        done, and the host may be a step ahead: four buckets on an H200.
        """
        if self.gradient_accumulation.averages_in_place:
            for bucket in self.ipg_buckets.values():
                if bucket.buffer:
                    with get_accelerator().stream(bucket.allocated_on):
                        WaitsOnDevice(self.reduction_stream).synchronize()
        super()._release_ipg_buffers()  # type: ignore[misc]

    def make_bucket(self: Any, dtype: torch.dtype) -> RotatingBucket:
        """Make a bucket for the first gradient of a dtype, which may come in the middle of a backward."""
        bucket = RotatingBucket()
        if self.ready_for_gradients:
            self._allocate(bucket, dtype)
        return bucket

    def reduce_ipg_grads(self: Any, comm_dtype: torch.dtype | None = None) -> None:
        """Order the additions to this rank's partition, and reduce gradients without a buffer once they are written.

        Upstream adds on the current stream, or on the reduction stream. It waits for a bucket's ``ready_events`` in
        ``average_tensor`` only, which is not called for gradients without a buffer.
        """
        if not streams_matter():
            super().reduce_ipg_grads(comm_dtype)  # type: ignore[misc]
            return
        stream = self.reduction_stream if self.overlap_comm else get_accelerator().current_stream()
        writers = self.gradient_accumulation.local_sums.writers
        with get_accelerator().stream(stream):
            writers.wait(PARTITION)
        if not self.contiguous_gradients:
            for dtype, bucket in self.ipg_buckets.items():
                if comm_dtype in (None, dtype):
                    for event in bucket.ready_events.values():
                        stream.wait_event(event)
                    for grad in bucket.grads:
                        grad.record_stream(stream)
        super().reduce_ipg_grads(comm_dtype)  # type: ignore[misc]
        with get_accelerator().stream(stream):
            writers.record(PARTITION)

    @contextmanager
    def without_host_waits(self: Any) -> Iterator[None]:
        """Around upstream's epilogue of a backward: it waits for the reduction on the device, and not on the host.

        Upstream synchronizes the device where reductions overlap, because it drops gradients next that the reduction
        stream may still read. Here the buckets are reduced before, and then the current stream, whose allocator gets
        the memory back, waits for the reduction stream. Under offload the host reads the gradients, and has to wait.
        """
        if not self.overlap_comm or self.cpu_offload or not streams_matter():
            yield
            return
        self.reduce_ipg_grads()
        WaitsOnDevice(self.reduction_stream).synchronize()
        self._clear_previous_reduced_grads()
        self.overlap_comm, self.reduce_ipg_grads = False, lambda: None  # what upstream would do first
        try:
            yield
        finally:
            self.overlap_comm = True
            del self.reduce_ipg_grads

    def average_tensor(self: Any, tensor: Tensor, communication_data_type: torch.dtype) -> None:
        """Reduce a bucket after all copies into it, without making a stream that copies wait for the reduction.

        Relies on upstream: the reduction stream waits for the bucket's ``ready_events``, and then the *current* stream
        waits for the reduction stream. Here the reduction stream is the current one, so it waits for itself.
        """
        if not streams_matter():
            super().average_tensor(tensor, communication_data_type)  # type: ignore[misc]
            return
        stream = self.reduction_stream if self.overlap_comm else get_accelerator().current_stream()
        with get_accelerator().stream(stream):
            if self.gradient_accumulation.averages_in_place and tensor.dtype == communication_data_type:
                self.average_in_place(tensor, stream)
            else:
                super().average_tensor(tensor, communication_data_type)  # type: ignore[misc]

    def average_in_place(self: Any, flat: Tensor, stream: Any) -> None:
        """Average a bucket over the ranks, and add this rank's parts of it to its partition.

        Upstream copies the bucket to another before the collective, copies this rank's parts back after it, and adds
        them one by one.
        """
        bucket = self.ipg_buckets[flat.dtype]
        for producer in bucket.copy_streams - {stream}:
            stream.wait_stream(producer)
        for event in bucket.ready_events.values():  # of a gradient that is larger than a bucket: upstream's hook
            stream.wait_event(event)
        if bucket.ready_events or not self.overlap_comm:
            flat.record_stream(stream)
        flat.div_(dist.get_world_size(group=self.dp_process_group))
        dist.all_reduce(flat, group=self.dp_process_group)
        slots, parts = self.gradient_accumulation.own_parts(flat)
        if slots:
            torch._foreach_add_(slots, parts)


def make_stream_safe(optimizer: Any, bucket_buffers: int) -> None:
    """Switch on upstream's ordering by events for ``optimizer``, and give it ``bucket_buffers`` physical buffers.

    Raises:
        RuntimeError: If upstream no longer has the switch.
    """
    if not isinstance(getattr(optimizer, "_offload_gradient_safety_enabled", None), bool):
        raise RuntimeError(
            "This DeepSpeed orders the reduction of gradients in an unknown way: its optimizer has no"
            " `_offload_gradient_safety_enabled`. Install a release that `python -m lightning_zeroplus doctor` names."
        )
    optimizer._offload_gradient_safety_enabled = True
    optimizer.bucket_buffers = bucket_buffers
    optimizer.ipg_buckets = BucketsByDtype(optimizer.make_bucket)
