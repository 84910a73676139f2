"""Ranks that must do the same: they meet before they communicate, and compare what they wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

_counts: dict[str, int] = {}


def is_distributed() -> bool:
    """Whether there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def meet(what: str, details: str) -> None:
    """Wait until all ranks call this with the same ``details``; costs some requests to the process group's store.

    Without it, a rank that comes alone would wait in a collective, or mix with a collective of another kind.

    Args:
        what: What the ranks are about to do, for the message.
        details: Must be equal on all ranks.

    Raises:
        RuntimeError: If not all ranks have come within the time limit of the process group, or if another rank has
            called :func:`abandon`.
        ValueError: If the ranks have come with different details.
    """
    if not is_distributed():
        return
    store, world_size = distributed_c10d._get_default_store(), dist.get_world_size()
    count = _counts.get(what, 0)
    key = f"zeroplus/{what}/{count}"
    digest = hashlib.sha1(details.encode()).hexdigest()
    store.add(f"{key}/{digest}", 1)
    if store.add(key, 1) == world_size:
        same = store.add(f"{key}/{digest}", 0)
        store.set(f"{key}/done", "same" if same == world_size else "different")
    limit = _time_limit()
    try:
        store.wait([f"{key}/done"], limit)
    except RuntimeError as error:  # DistStoreError
        here = store.add(key, -1) + 1
        store.add(f"{key}/{digest}", -1)
        raise RuntimeError(
            f"{what}: {here} of {world_size} ranks have come here within {limit}, the time limit of the process group."
            " All ranks must enter it together: for example, not under `if trainer.is_global_zero`."
        ) from error
    _counts[what] = count + 1
    if store.get(f"{key}/done") == b"abandoned":
        raise RuntimeError(f"Another rank has raised an error before {what}. See its traceback.")
    if store.get(f"{key}/done") != b"same":
        raise ValueError(f"{what}: the ranks have come with different arguments; here with {details}.")


def abandon(what: str) -> None:
    """Let the other ranks raise in :func:`meet`, because this rank has raised an error. Does not wait for them."""
    if is_distributed():
        count = _counts.get(what, 0)
        distributed_c10d._get_default_store().set(f"zeroplus/{what}/{count}/done", "abandoned")
        _counts[what] = count + 1


def device() -> torch.device:
    """The device on which the process group communicates; the CPU, if it does on several."""
    return torch.device(distributed_c10d._get_object_coll_device(distributed_c10d._get_default_group()))


def _time_limit() -> timedelta:
    group = distributed_c10d._get_default_group()
    limit = getattr(getattr(group._get_backend(device()), "options", None), "_timeout", None)
    return limit if isinstance(limit, timedelta) else distributed_c10d.default_pg_timeout


def checksum(tensors: Iterable[Tensor]) -> list[int]:
    """A few sums over the bits of ``tensors``: they differ if ranks have written different values."""
    sums = [0, 0, 0]
    for position, tensor in enumerate(tensors, 1):
        flat = tensor.detach().contiguous().flatten()
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64)
        bits = flat.view(integer)
        parts: Sequence[Tensor] = (bits, bits[: bits.numel() // 2], bits[::3])
        for index, part in enumerate(parts):
            sums[index] = (sums[index] * 31 + position * int(part.sum(dtype=torch.int64))) % 2**61
    return sums


def all_equal(values: Any) -> bool:
    """Whether ``values`` are the same on all ranks."""
    if not is_distributed():
        return True
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    return all(each == found[0] for each in found)
