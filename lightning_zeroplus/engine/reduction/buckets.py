"""Reduction buckets, one for each dtype in which gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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

        Where gradients stay where they are until then, upstream has most to do for nothing: the bucket is a list.
        """
        if not self.gradient_accumulation.needs_no_buffer:
            super().process_gradients(param, group)  # type: ignore[misc]
            return
        if not self.ready_for_gradients:
            self.setup_buckets()
        if self.use_grad_accum_attribute:
            self._fill_param_grad_accum_attribute(param)
        if not getattr(param, "ds_grad_is_ready", True):  # a tiled layer's, of which more is to come
            return
        dtype, numel = self.get_param_comm_dtype(param), param.numel()
        if self.ipg_buckets[dtype].elements + numel > self.reduce_bucket_size:
            self.reduce_ipg_grads(comm_dtype=dtype)
        bucket = self.ipg_buckets[dtype]
        bucket.elements += numel
        bucket.params.append((group, param.param_idx_in_group, self.get_param_id(param)))
