"""An action on all ranks that fails on all of them if it fails on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def everywhere(action: Callable[[], T]) -> T:
    """Call ``action`` on every rank, and go on only if it has succeeded on all.

    Args:
        action: What to do on this rank. It must not communicate: a rank that fails would leave the others waiting.

    Raises:
        Exception: What ``action`` raised here.
        RuntimeError: If it raised on another rank only, with that rank's error.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as problem:
        error = problem
    said = None if error is None else f"{type(error).__name__}: {error}"
    answers: list[str | None] = [said]
    if dist.is_available() and dist.is_initialized():
        answers = [None] * dist.get_world_size()
        dist.all_gather_object(answers, said)
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if answer is not None:
            raise RuntimeError(f"Rank {rank} failed: {answer}")
    return result  # type: ignore[return-value]
