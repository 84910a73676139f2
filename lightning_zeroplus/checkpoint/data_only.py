"""Reading checkpoints without executing code from them.

``torch.distributed.checkpoint`` unpickles the file ``.metadata``, and every value that is not a tensor, without any
restriction. Here a restricted unpickler, which accepts data only, reads both first.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import zipfile
from typing import IO, Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from lightning_zeroplus.checkpoint.places.address import Address, Files, StoreError
from lightning_zeroplus.checkpoint.places.files import local_copy, reads_from, sizes_in

METADATA = ".metadata"
HOW_TO_ALLOW = (
    "If you trust its source, name the classes in `torch.serialization.add_safe_globals([...])`, or pass"
    " `weights_only=False` to `Trainer.fit` (or validate, test, predict) or `fabric.load`, which may execute code from"
    " the file."
)


def load_data(path: str | os.PathLike[str] | Address, weights_only: bool = True, mmap: bool = False) -> Any:
    """``torch.load`` into host memory, with errors that name the file.

    Args:
        path: A file that ``torch.save`` has written. From an address it is copied to a temporary file first.
        weights_only: Read tensors, plain data, and the classes of ``torch.serialization.add_safe_globals`` only. False
            unpickles anything, and so may execute code from the file.
        mmap: Leave tensors in the file until they are used.

    Raises:
        RuntimeError: If the file is missing or damaged, or contains more than ``weights_only`` allows.
    """
    try:
        with local_copy(path) as local:
            with open(local, "rb") as file:
                if zipfile.is_zipfile(file):  # files before torch 1.6 are not
                    check_sums(file)
            return torch.load(local, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except pickle.UnpicklingError as error:
        if weights_only and "weights_only" in str(error).lower() and "GLOBAL" in str(error).upper():
            raise RuntimeError(f"{str(path)!r} contains more than data. {HOW_TO_ALLOW}\n{error}") from error
        raise _damaged(path, error) from error
    except (RuntimeError, EOFError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from error


def check_sums(file: IO[bytes]) -> None:
    """Verify the checksums that ``torch.save`` writes and ``torch.load`` ignores.

    Raises:
        ValueError: If one is wrong.
    """
    with zipfile.ZipFile(file) as archive:
        wrong = archive.testzip()
    file.seek(0)
    if wrong is not None:
        raise ValueError(f"the checksum of {wrong!r} is wrong")


def _damaged(path: str | os.PathLike[str] | Address, error: Exception) -> RuntimeError:
    if isinstance(error, FileNotFoundError):
        return RuntimeError(f"{str(path)!r} is missing from the checkpoint.")
    if isinstance(error, StoreError):
        return error
    return RuntimeError(f"{str(path)!r} is damaged, or was not written by torch.save: {error}")


class DataOnlyReader(FileSystemReader):
    """Reads the metadata only if it refers to data classes alone, and verifies checksums.

    Args:
        folder: What ``torch.distributed.checkpoint`` has written, also at an address.
    """

    def __init__(self, folder: Files) -> None:
        super().__init__(str(folder))
        self._folder = folder
        reads_from(self, folder)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        file.seek(sinfo.offset)
        content = io.BytesIO(file.read(sinfo.length))
        try:
            check_sums(content)
        except (ValueError, zipfile.BadZipFile) as error:
            raise RuntimeError(f"{str(self._folder / sinfo.relative_path)!r} is damaged: {error}") from error
        return content

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Read each file from its beginning on: at an address every step back is a request."""

        def place(item: ReadItem) -> tuple[str, int]:
            stored = self.storage_data[item.storage_index]
            return stored.relative_path, stored.offset

        return dataclasses.replace(plan, items=sorted(plan.items, key=place))

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


def read_metadata(folder: Files) -> Metadata:
    """Read ``.metadata`` and check that the files it names exist and are long enough.

    Raises:
        RuntimeError: If a file is missing, damaged or too short, or ``.metadata`` refers to more than data; naming it.
    """
    path = folder / METADATA
    try:
        metadata = DataOnlyReader(folder).read_metadata()
    except FileNotFoundError as error:
        raise RuntimeError(f"{str(path)!r} is missing: the checkpoint is not complete.") from error
    except pickle.UnpicklingError as error:
        if "not data" in str(error):
            raise RuntimeError(f"{str(path)!r}: {error}") from error
        raise RuntimeError(f"{str(path)!r} is damaged: {error}") from error
    except OSError as error:
        raise RuntimeError(f"{str(path)!r} cannot be read: {error}") from error
    except Exception as error:  # a damaged pickle raises anything
        raise RuntimeError(f"{str(path)!r} is damaged: {type(error).__name__}: {error}") from error
    needed: dict[str, int] = {}
    for stored in (metadata.storage_data or {}).values():
        end = stored.offset + stored.length
        needed[stored.relative_path] = max(end, needed.get(stored.relative_path, 0))
    sizes = sizes_in(folder, needed)
    for name, length in needed.items():
        file = folder / name
        if name not in sizes:
            raise RuntimeError(f"{str(file)!r} is missing. Put the folder where all nodes can read it.")
        if sizes[name] < length:
            raise RuntimeError(f"{str(file)!r} is truncated: {sizes[name]} of {length} bytes.")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if "." not in name:
            if module in (dcp_metadata.__name__, dcp_filesystem.__name__):
                found = getattr(dcp_metadata if module == dcp_metadata.__name__ else dcp_filesystem, name, None)
                # Only classes that these modules define, not what they import.
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
    # The storage's own path, which reading does not use. Constructing a path touches no file.
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath", "WindowsPath")),
}


def _is_record(cls: type) -> bool:
    """Whether this is a dataclass or an enumeration, whose construction computes nothing."""
    return hasattr(cls, "__dataclass_fields__") or hasattr(cls, "__members__")
