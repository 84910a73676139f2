"""Weights that a user passes to a collective, as in ``dist.broadcast(param, 0)``: autograd does not count the write."""

from __future__ import annotations

from typing import Any

from torch.distributed import distributed_c10d

from lightning_zeroplus.gradients.patches.replacement import Replacement

# Relies on torch: each collective calls this for each of its tensors.
_check: Any = distributed_c10d._check_single_tensor


def _check_and_note(tensor: Any, name: str) -> None:
    note = getattr(type(tensor), "note_write", None)
    if note is not None:
        note(tensor)
    _check(tensor, name)


#: Within ``noting_collectives()``, a collective calls ``param.note_write()`` for its tensors, in the whole process.
noting_collectives = Replacement(distributed_c10d, "_check_single_tensor", _check_and_note)
