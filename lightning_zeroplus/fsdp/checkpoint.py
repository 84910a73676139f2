"""Loading a distributed checkpoint without executing code from it.

``torch.distributed.checkpoint`` unpickles the file ``.metadata``, and every value that is not a tensor, without any
restriction. Here both are first read by an unpickler that knows nothing but data.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader, load
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer


def load_distributed(
    path: str | os.PathLike[str], module: nn.Module, optimizers: Sequence[Optimizer], strict: bool = True
) -> None:
    """Load ``state_dict`` and ``optimizer_0``, ``optimizer_1``, ... in place, at any world size.

    Args:
        path: The folder.
        module: A sharded module, or one with sharded children.
        optimizers: Its optimizers, in the order in which they were saved.
        strict: Refuse a checkpoint without some of the module's tensors.

    Raises:
        RuntimeError: If the checkpoint contains anything but tensors and plain data, or does not fit.
    """
    state: dict[str, Any] = {"state_dict": get_model_state_dict(module)}
    _load(path, state, allow_partial_load=not strict)
    set_model_state_dict(module, state["state_dict"], options=StateDictOptions(strict=strict))
    for index, optimizer in enumerate(optimizers):
        state = {f"optimizer_{index}": get_optimizer_state_dict(module, optimizer)}
        _load(path, state)
        set_optimizer_state_dict(module, optimizer, optim_state_dict=state[f"optimizer_{index}"])


def _load(path: str | os.PathLike[str], state: dict[str, Any], **kwargs: Any) -> None:
    try:
        load(state, storage_reader=DataOnlyReader(path), planner=DataOnlyPlanner(**kwargs))
    except CheckpointException as error:  # a BaseException
        raise RuntimeError(f"The checkpoint {os.fspath(path)!r} cannot be loaded: {error}") from error


class DataOnlyReader(FileSystemReader):
    """Reads the metadata only if it refers to nothing but the metadata's own classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            _MetadataUnpickler(file).load()
        return super().read_metadata(*args, **kwargs)


class DataOnlyPlanner(DefaultLoadPlanner):
    """Reads values that are not tensors only if ``torch.load(weights_only=True)`` can."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        start = value.tell()
        torch.load(value, map_location="cpu", weights_only=True)
        value.seek(start)
        super().load_bytes(read_item, value)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if "." not in name:
            if module in (dcp_metadata.__name__, dcp_filesystem.__name__):
                found = getattr(dcp_metadata if module == dcp_metadata.__name__ else dcp_filesystem, name, None)
                # Classes that are defined there; not what these modules have imported.
                if isinstance(found, type) and found.__module__ == module and _is_record(found):
                    return found
            if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
                return getattr(torch, name)
            if (module, name) in _PLAIN:
                return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"The checkpoint's .metadata refers to {module}.{name}, which is not data. Load it only if you trust its"
            " source, with `weights_only=False`."
        )


_PLAIN = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    # The storage's own path, which reading does not use. Making a path touches no file.
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath", "WindowsPath")),
}


def _is_record(cls: type) -> bool:
    """A dataclass or an enumeration: making one computes nothing."""
    return hasattr(cls, "__dataclass_fields__") or hasattr(cls, "__members__")
