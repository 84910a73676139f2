"""An action that fails on all ranks if it fails on one."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

T = TypeVar("T")


class _Failure(NamedTuple):
    """A rank's error, as it sends it to the others."""

    pickled: bytes
    printed: str


def everywhere(action: Callable[[], T], group: Any = None) -> T:
    """Call ``action`` on every rank, and return only if it has succeeded on all.

    If it fails on any rank, every rank raises. Code that catches the error takes the same branch on all ranks, and the
    user reads the cause whichever rank prints first.

    Args:
        action: What to do on this rank. It must not communicate: a rank that fails would leave the others waiting.
        group: The process group by which the ranks tell each other; None: the default group.

    Returns:
        The result of ``action`` on this rank.

    Raises:
        Exception: The error of ``action`` on this rank; else the error of the first rank that failed, with a note that
            names the rank and shows its traceback. A ``RuntimeError`` replaces an error that cannot be pickled.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as problem:
        error = problem
    failures: list[_Failure | None] = [None]
    if dist.is_available() and dist.is_initialized():
        failures = [None] * dist.get_world_size(group)
        dist.all_gather_object(failures, None if error is None else _describe(error), group=group)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            other: Exception = pickle.loads(failure.pickled)
            if hasattr(other, "add_note"):  # from Python 3.11 on
                other.add_note(f"Rank {rank} failed, and all ranks with it. Its traceback:\n{failure.printed}")
            raise other
    return result  # type: ignore[return-value]


@contextmanager
def errors_of_torch(said: str) -> Iterator[None]:
    """Raise what ``torch.distributed.checkpoint`` raises within as an error that callers know.

    It wraps what any rank raises in a ``CheckpointException``, and so hides Ctrl-C: the Trainer would call the fit
    failed, and not interrupted.

    Args:
        said: What could not be done.

    Raises:
        KeyboardInterrupt, SystemExit: If any rank was ended so; on all ranks, if they save or load together.
        RuntimeError: ``said``, with the error of the lowest rank that failed.
    """
    try:
        yield
    except CheckpointException as error:  # a BaseException
        failures = sorted(error.failures.items())
        for _, (cause, _) in failures:
            if not isinstance(cause, Exception):
                raise cause from error
        rank, (cause, _) = failures[0]
        raise RuntimeError(f"{said}: {type(cause).__name__} on rank {rank}: {cause}") from error


def _describe(error: Exception) -> _Failure:
    printed = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        if str(pickle.loads(pickled)) == str(error):
            return _Failure(pickled, printed)
    except Exception:  # for example a local class, or one whose `args` do not fit its constructor
        pass
    return _Failure(pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}")), printed)
