"""Frozen parameters that are trainable for a moment: torch and DeepSpeed leave frozen ones out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def made_trainable(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Make the frozen ones of ``params`` trainable within."""
    frozen = [param for param in params if not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)
