"""With which factor the loss of the running backward was multiplied, in fp16.

An engine expects gradients of a loss that has its own loss scale, by which its optimizer divides. Other gradients are
multiplied with what they lack when they come: those of ``loss.backward()``, of a loss of several models, of which each
has a scale of its own, and weight gradients that were deferred in another backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Not per thread: on an accelerator, autograd calls hooks on threads of its own.
_running = [1.0]


def running() -> float:
    """The factor of the loss whose backward runs; 1 outside of :func:`scaled_by`."""
    return _running[-1]


@contextmanager
def scaled_by(factor: float) -> Iterator[None]:
    """Around a backward whose loss was multiplied with ``factor``; backwards nest."""
    _running.append(factor)
    try:
        yield
    finally:
        _running.pop()
