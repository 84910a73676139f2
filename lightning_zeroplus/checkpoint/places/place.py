"""Where a checkpoint lies, and how a new one replaces it, so that a kill leaves the old one or the new one.

:class:`LocalPlace` exchanges two folders: see :mod:`..atomic`. :class:`RemotePlace` writes under a new name, and then
the one object that says so: see :mod:`.pointer`. What reads a checkpoint, or writes into it, sees ``Files``.
"""

from __future__ import annotations

import logging
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from lightning_zeroplus.checkpoint import atomic
from lightning_zeroplus.checkpoint.places import pointer
from lightning_zeroplus.checkpoint.places.address import Address, Files, errors_of_store, files_at

log = logging.getLogger(__name__)


class Place(Protocol):
    """Where a checkpoint lies. One process, of rank 0, calls what changes it."""

    @property
    def staging(self) -> Files:
        """The folder to which all ranks write the new checkpoint."""

    def prepare(self) -> None:
        """Clean up after a killed save, before a new checkpoint is written.

        Raises:
            FileExistsError: If there is something else than a checkpoint, which would be lost.
            OSError, RuntimeError: If nothing can be written here.
        """

    def commit(self) -> None:
        """Replace the old checkpoint by what is in :attr:`staging`."""

    def put(self, content: bytes) -> None:
        """Replace the old checkpoint by one file, after :meth:`prepare` and in place of :meth:`commit`."""

    def discard(self) -> None:
        """Remove what is in :attr:`staging` after a failed save. Ignores errors."""

    def remove(self) -> None:
        """Remove the checkpoint, if there is one. A kill leaves it whole or gone, except for leftovers."""

    def readable(self) -> Files:
        """The folder or the file to read, which does not exist if there is no checkpoint.

        Raises:
            RuntimeError: If that cannot be found out.
        """


def place_of(path: str | os.PathLike[str], unique: str | None = None) -> Place:
    """The place at a path or an address.

    Args:
        path: The checkpoint.
        unique: A name that no other save has, the same on all ranks that save together; 32 hexadecimal digits.

    Raises:
        ValueError: If fsspec does not know the address.
    """
    files = files_at(path)
    return RemotePlace(files, unique or uuid.uuid4().hex) if isinstance(files, Address) else LocalPlace(files)


class LocalPlace:
    """A path of a local or mounted file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def staging(self) -> Path:
        return atomic.staging(self.path)

    def prepare(self) -> None:
        atomic.prepare(self.path)

    def commit(self) -> None:
        atomic.commit(self.path)

    def put(self, content: bytes) -> None:
        self.staging.write_bytes(content)
        atomic.commit(self.path)

    def discard(self) -> None:
        atomic.discard(self.path)

    def remove(self) -> None:
        atomic.remove(self.path)

    def readable(self) -> Path:
        """As :meth:`Place.readable`. What was saved at an address may have been copied here, or be mounted."""
        path = atomic.readable(self.path)
        with suppress(OSError):  # reading it raises that again, and says more
            return _followed(path) if path.is_file() else path
        return path


class RemotePlace:
    """An address.

    Args:
        address: The checkpoint.
        unique: See :func:`place_of`.
    """

    def __init__(self, address: Address, unique: str) -> None:
        self.address, self._unique = address, unique
        self._parts = pointer.folder_of(address)

    def __str__(self) -> str:
        return str(self.address)

    @property
    def staging(self) -> Address:
        return self._parts / self._unique

    def prepare(self) -> None:
        fs = self.address.fs
        with errors_of_store(self.address, "written"):
            fs.invalidate_cache()
            if self.address.is_dir():
                raise FileExistsError(
                    f"The address {str(self)!r} is a folder, which saving would hide. Save to another address."
                )
            with suppress(RuntimeError):  # a damaged pointer: what it named stays until it is replaced
                self._remove_parts(keep=pointer.unique_of(self.address) if self.address.is_file() else None)
            fs.makedirs(self.staging.path, exist_ok=True)  # nothing where a store has no folders

    def commit(self) -> None:
        with errors_of_store(self.address, "written"):
            self.address.write_bytes(pointer.content_of(self._unique))
        self._remove_parts(keep=self._unique)

    def put(self, content: bytes) -> None:
        with errors_of_store(self.address, "written"):
            self.address.write_bytes(content)
        self._remove_parts()

    def discard(self) -> None:
        with suppress(Exception):
            self.address.fs.invalidate_cache()  # the other ranks have written, too
            self.address.fs.rm(self.staging.path, recursive=True)

    def remove(self) -> None:
        fs, path = self.address.fs, self.address.path
        with errors_of_store(self.address, "removed"):
            fs.invalidate_cache()
            if self.address.is_file():
                fs.rm_file(path)  # first: without it there are no parts
            elif self.address.is_dir():
                fs.rm(path, recursive=True)
        self._remove_parts()

    def readable(self) -> Address:
        with errors_of_store(self.address, "read"):
            self.address.fs.invalidate_cache()  # others may have saved
            return _followed(self.address) if self.address.is_file() else self.address

    def _remove_parts(self, keep: str | None = None) -> None:
        """Remove the parts of other saves. Where the store forbids that they stay, and the checkpoint is good."""
        fs, folder = self.address.fs, self._parts
        try:
            fs.invalidate_cache()
            if not folder.is_dir():
                return
            names = {each.rstrip("/").rpartition("/")[2] for each in fs.ls(folder.path, detail=False)}
            removed = {name for name in names - {keep} if pointer.is_unique(name)}
            for name in sorted(removed):
                fs.rm((folder / name).path, recursive=True)
            if names == removed and folder.is_dir():  # where a store has folders
                fs.rmdir(folder.path)
        except Exception as error:
            log.warning(f"Old parts of the checkpoint {str(self)!r} could not be removed: {error}")


def _followed(file: pointer.OneOf) -> pointer.OneOf:
    """The folder to which a pointer points, or the file itself."""
    unique = pointer.unique_of(file)
    return file if unique is None else pointer.folder_of(file) / unique
