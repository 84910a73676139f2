"""Weights that a user gives to a collective, as in ``dist.broadcast(param, 0)``: autograd does not count the write."""

from __future__ import annotations

from typing import Any

from torch.distributed import distributed_c10d

from lightning_zeroplus.gradients.patches.replacement import Replacement

# Relies on each collective of tensors checking them by it.
_check: Any = distributed_c10d._check_single_tensor


def _check_and_note(tensor: Any, name: str) -> None:
    note = getattr(type(tensor), "note_write", None)
    if note is not None:
        note(tensor)
    _check(tensor, name)


#: Within ``noting_collectives()``, in the whole process, ``param.note_write()`` is called when a collective gets it.
noting_collectives = Replacement(distributed_c10d, "_check_single_tensor", _check_and_note)
