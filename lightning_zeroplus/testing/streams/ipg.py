"""The names of DeepSpeed's gradient buckets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import Tensor


def bucket_name(tensor: Tensor) -> str | None:
    """The name of the bucket that the tensor lies in; None without a ZeRO optimizer among the callers, or a bucket."""
    storage = tensor.untyped_storage()._cdata
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        buckets = getattr(frame.f_locals.get("self"), "ipg_buckets", None)
        if isinstance(buckets, dict):
            for name, buffer in _buffers(buckets):
                if buffer.untyped_storage()._cdata == storage:
                    return name
        frame = frame.f_back
    return None


def _buffers(buckets: dict[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    for dtype, bucket in buckets.items():
        buffers = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
        for index, buffer in enumerate(buffers):
            if isinstance(buffer, Tensor):
                yield f"ipg buffer {index} ({dtype})", buffer
