"""Weights that a user gives to a collective, as in ``dist.broadcast(param, 0)``: autograd does not count the write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import distributed_c10d

_c10d: Any = distributed_c10d
_check = _c10d._check_single_tensor


class _Users:
    count = 0


@contextmanager
def noting_collectives() -> Iterator[None]:
    """Within, in the whole process: ``param.note_write()`` is called when ``torch.distributed`` gets ``param``."""
    _Users.count += 1
    _c10d._check_single_tensor = _check_and_note
    try:
        yield
    finally:
        _Users.count -= 1
        if not _Users.count:
            _c10d._check_single_tensor = _check


def _check_and_note(tensor: Any, name: str) -> None:
    note = getattr(type(tensor), "note_write", None)
    if note is not None:
        note(tensor)
    _check(tensor, name)
