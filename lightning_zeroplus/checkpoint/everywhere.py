"""An action on all ranks that fails on all of them if it fails on one."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class _Failure(NamedTuple):
    """What a rank tells the others of its error."""

    pickled: bytes
    printed: str


def everywhere(action: Callable[[], T]) -> T:
    """Call ``action`` on every rank, and go on only if it has succeeded on all.

    An error is raised on all ranks, whatever they are on their own: code that catches it takes the same way everywhere,
    and whichever rank is the first to print it, the user reads what has happened.

    Args:
        action: What to do on this rank. It must not communicate: a rank that fails would leave the others waiting.

    Raises:
        Exception: What ``action`` raised here; else what it raised on the first rank on which it did, with a note that
            names the rank and shows its traceback. A ``RuntimeError`` stands for one that cannot be pickled.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as problem:
        error = problem
    failures: list[_Failure | None] = [None]
    if dist.is_available() and dist.is_initialized():
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, None if error is None else _describe(error))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            other: Exception = pickle.loads(failure.pickled)
            if hasattr(other, "add_note"):  # from Python 3.11 on
                other.add_note(f"Rank {rank} failed, and all ranks with it. There:\n{failure.printed}")
            raise other
    return result  # type: ignore[return-value]


def _describe(error: Exception) -> _Failure:
    printed = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        if str(pickle.loads(pickled)) == str(error):
            return _Failure(pickled, printed)
    except Exception:  # as of a class without a name, or whose arguments are not those of its constructor
        pass
    return _Failure(pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}")), printed)
