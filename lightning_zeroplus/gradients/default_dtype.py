"""The default dtype, which a 16-bit precision changes for the user's code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def in_fp32() -> Iterator[None]:
    """Within, new tensors are of fp32 where they would be of 16 bits: a step updates fp32 weights, by an fp32 norm."""
    before = torch.get_default_dtype()
    if before not in (torch.bfloat16, torch.float16):
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
