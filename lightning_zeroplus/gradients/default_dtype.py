"""The default dtype, which a 16-bit precision changes while the user's code runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def in_fp32() -> Iterator[None]:
    """Make fp32 the default dtype within if it has 16 bits: a step needs fp32 weights and an fp32 norm."""
    before = torch.get_default_dtype()
    if before not in (torch.bfloat16, torch.float16):
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
