"""Writing what a checkpoint holds besides sharded tensors; :mod:`..sources` reads it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from lightning_zeroplus.checkpoint.places.address import Files
from lightning_zeroplus.checkpoint.sources import TRAINER


def save_trainer_state(path: Files, state: Mapping[str, Any] | bytes) -> None:
    """Write the state that is not sharded; on one rank only.

    Args:
        path: The folder.
        state: The state, or what :func:`serialized` has made of it.
    """
    if isinstance(state, bytes):
        (path / TRAINER).write_bytes(state)
    else:
        with (path / TRAINER).open("wb") as file:
            torch.save(dict(state), file)


def serialized(state: Mapping[str, Any]) -> bytes:
    """The content of the file that :func:`save_trainer_state` writes, as the state is now."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()
