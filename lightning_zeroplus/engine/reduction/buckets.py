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
