"""What differs between reading and writing files of a local folder and of an address."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase

from lightning_zeroplus.checkpoint.places.address import Address, Files, errors_of_store


@contextmanager
def local_copy(file: str | os.PathLike[str] | Address) -> Iterator[str | os.PathLike[str]]:
    """The file itself, or a copy of one at an address, which is removed on exit. What is mapped into memory stays.

    Raises:
        FileNotFoundError, StoreError: If there is no such file at the address, or it cannot be read.
    """
    if not isinstance(file, Address):
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="zeroplus-") as folder:
        copy = Path(folder, "copy")
        with errors_of_store(file, "read"):
            file.fs.get_file(file.path, str(copy))
        yield copy


def sizes_in(folder: Files, names: Collection[str]) -> dict[str, int]:
    """The sizes of those files that are there, in bytes; at an address with one listing."""
    if isinstance(folder, Address):
        with errors_of_store(folder, "read"):
            found = folder.fs.find(folder.path, detail=True)
        sizes = {name.removeprefix(f"{folder.path}/"): int(each["size"]) for name, each in found.items()}
        return {name: sizes[name] for name in names if name in sizes}
    return {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}


def writer_to(folder: Files) -> FileSystemWriter:
    """What ``torch.distributed.checkpoint`` writes with, for an empty folder."""
    return _ObjectWriter(folder) if isinstance(folder, Address) else FileSystemWriter(folder)


class ObjectFiles(FileSystemBase):
    """The files of an address, as ``torch.distributed.checkpoint`` sees a file system.

    torch has such a class too. It renames, makes folders and asks what exists, on every rank; an object store cannot do
    the first, and is paid for the others.
    """

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with self.fs.open(path, mode) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        # Of the metadata alone, and not atomic: nobody reads the folder yet.
        self.fs.pipe_file(new_path, self.fs.cat_file(path))
        with suppress(Exception):  # the store may keep everything
            self.fs.rm_file(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: rank 0 has made the folder, where the store has folders."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False  # asked of metadata before it is written: a folder is written once

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self.fs.rm_file(path)


class _ObjectWriter(FileSystemWriter):
    def __init__(self, folder: Address) -> None:
        # An object is complete when it is closed: there is nothing to flush, and torch would flush all disks.
        super().__init__(str(folder), sync_files=False)
        self.fs: Any = ObjectFiles(folder.fs)
        self.path: Any = folder.path


def reads_from(reader: Any, folder: Files) -> None:
    """Let a ``FileSystemReader`` read from an address."""
    if isinstance(folder, Address):
        reader.fs, reader.path = ObjectFiles(folder.fs), folder.path
