"""Checks of the arguments that the strategies have in common, made when a strategy is constructed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def check_timeout(timeout: timedelta | None) -> timedelta:
    """Return the time limit of collectives: ``timeout``, or torch's default for None.

    Raises:
        MisconfigurationException: If it is neither None nor a positive timedelta.
    """
    if timeout is None:
        return default_pg_timeout
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise MisconfigurationException(f"`timeout` must be None or a positive `datetime.timedelta`, not {timeout!r}.")
    return timeout


def check_backend(backend: str | None) -> str | None:
    """Return the process group's backend, such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.

    Raises:
        MisconfigurationException: If torch knows no such backend.
    """
    if backend is None:
        return None
    known = torch.distributed.Backend.backend_list if torch.distributed.is_available() else []
    parts = backend.split(",") if isinstance(backend, str) else []
    if not parts or any(part.rpartition(":")[2].lower() not in known for part in parts):
        raise MisconfigurationException(
            f"`process_group_backend` must be None, or one of {', '.join(known[1:])}, or a list such as"
            f' "cpu:gloo,cuda:nccl", not {backend!r}.'
        )
    return backend


def check_bool(name: str, value: Any) -> None:
    """Refuse values that only look like a boolean, such as ``"false"``.

    Raises:
        MisconfigurationException: If ``value`` is not a boolean, naming the argument.
    """
    if not isinstance(value, bool):
        raise MisconfigurationException(f"`{name}` must be True or False, not {value!r}.")


def check_positive(name: str, value: Any) -> None:
    """Refuse a limit of ``fabric.clip_gradients`` that is not a positive number.

    Raises:
        MisconfigurationException: Naming the argument and the value.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise MisconfigurationException(f"`fabric.clip_gradients({name}={value!r})`: give a positive number.")
