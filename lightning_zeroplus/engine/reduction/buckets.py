"""Reduction buckets, one for each dtype in which gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from lightning_zeroplus.engine.reduction.host_waits import WaitsOnDevice


class BucketsByDtype(dict[torch.dtype, Any]):
    """The buckets of an optimizer; the first gradient of a dtype makes a bucket for it.

    Upstream has one bucket, for the communication dtype. Here a gradient is reduced in the dtype that it should have
    (:mod:`lightning_zeroplus.gradients.dtype`), which may differ from parameter to parameter.

    Args:
        make: Makes an empty bucket for a dtype.
    """

    def __init__(self, make: Callable[[torch.dtype], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, dtype: torch.dtype) -> Any:
        self[dtype] = bucket = self._make(dtype)
        return bucket


class FillsBuckets:
    """Overrides on ``DeepSpeedZeroOptimizer``."""

    def put_into_bucket(self: Any, param: Any, group: int) -> None:
        """What upstream's hook does with every gradient: put it into a bucket, after it has reduced a full one.

        Where gradients stay where they are until then, the bucket is a list. Where they are copied and the bucket is
        averaged in place, one event per bucket and stream is enough: upstream records and waits for one per gradient.
        """
        accumulation, numel = self.gradient_accumulation, param.numel()
        copies = accumulation.averages_in_place
        if not (copies or accumulation.needs_no_buffer) or (copies and numel > self.reduce_bucket_size):
            if param.grad is not None and not param.grad.is_contiguous():
                param.grad.data = param.grad.data.contiguous()  # of `channels_last`: upstream takes a flat view of it
            super().process_gradients(param, group)  # type: ignore[misc]
            return
        if not self.ready_for_gradients:
            self.setup_buckets()
        if self.use_grad_accum_attribute:
            self._fill_param_grad_accum_attribute(param)
        if not getattr(param, "ds_grad_is_ready", True):  # a tiled layer's, of which more is to come
            return
        dtype = self.get_param_comm_dtype(param)
        bucket = self.ipg_buckets[dtype]
        if bucket.elements + numel > self.reduce_bucket_size:
            self.reduce_ipg_grads(comm_dtype=dtype)
            bucket = self.ipg_buckets[dtype]
            if self.overlap_comm:
                bucket.index += 1
        if copies:
            self.copy_into_bucket(bucket, self.get_gradient_for_reduction(param))
        bucket.elements += numel
        bucket.params.append((group, param.param_idx_in_group, self.get_param_id(param)))

    def copy_into_bucket(self: Any, bucket: Any, grad: Tensor) -> None:
        """Move a gradient to the end of a bucket, whose physical buffer may still be read by an earlier reduction."""
        stream = get_accelerator().current_stream()
        if stream not in bucket.copy_streams:
            bucket.copy_streams.add(stream)
            if stream != bucket.allocated_on:  # whose order is all that the allocator knows
                WaitsOnDevice(bucket.allocated_on).synchronize()
            if (reduced := bucket.reuse_events.get(bucket.index)) is not None:
                stream.wait_event(reduced)
        grad.record_stream(stream)  # another one may have allocated it
        place = bucket.buffer[bucket.index].narrow(0, bucket.elements, grad.numel()).view(grad.shape)
        place.copy_(grad)
        grad.data = place
