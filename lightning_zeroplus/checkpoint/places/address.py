"""Files at an address, such as ``s3://bucket/last.ckpt``, through fsspec."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem


class Size(NamedTuple):
    """What :meth:`Address.stat` tells."""

    st_size: int


class StoreError(RuntimeError):
    """What a store has refused, or why it could not be reached."""


class Address:
    """A file or a folder at an address, with those methods of ``pathlib.Path`` that reading a checkpoint needs.

    Args:
        text: The address.
        fs: Its filesystem. Whoever writes to a filesystem also corrects what that instance remembers of folders, so all
            of a checkpoint is written through one.
        path: The path in it.
    """

    def __init__(self, text: str, fs: Any, path: str) -> None:
        self._text, self.fs, self.path = text, fs, path

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Address({self._text!r})"

    def __reduce__(self) -> tuple[Callable[[str], Path | Address], tuple[str]]:
        # Another rank makes a filesystem of its own: connections cannot be sent, and keys should not be.
        return files_at, (self._text,)

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self._text}/{name}", self.fs, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.name)[1]

    def with_name(self, name: str) -> Address:
        folder, separator, _ = self.path.rpartition("/")
        return Address(self._text.removesuffix(self.name) + name, self.fs, folder + separator + name)

    def exists(self) -> bool:
        return self._type() is not None

    def is_dir(self) -> bool:
        return self._type() == "directory"

    def is_file(self) -> bool:
        return self._type() == "file"

    def _type(self) -> str | None:
        # fsspec's own `exists` and `isfile` are False after any error. What cannot be reached would seem to be gone.
        try:
            found: str = self.fs.info(self.path)["type"]
        except FileNotFoundError:
            return None
        return found

    def stat(self) -> Size:
        return Size(int(self.fs.info(self.path)["size"]))

    def glob(self, pattern: str) -> Iterator[Address]:
        for found in self.fs.glob(f"{self.path}/{pattern}"):
            yield self / found.removeprefix(f"{self.path}/")

    def open(self, mode: str) -> IO[bytes]:
        file: IO[bytes] = self.fs.open(self.path, mode)
        return file

    def write_bytes(self, content: bytes) -> None:
        """Put one object. On an object store others see the old one or the new one, whole."""
        self.fs.pipe_file(self.path, content)

    def put_file(self, local: Path) -> None:
        """Put one object with the content of a local file, of any size."""
        folder = self.path.rpartition("/")[0]
        if folder:
            self.fs.makedirs(folder, exist_ok=True)  # nothing where a store has no folders
        self.fs.put_file(str(local), self.path)


#: A file or a folder that can be read.
Files: TypeAlias = Path | Address


def files_at(path: str | os.PathLike[str]) -> Files:
    """The files at a path or an address, which need not exist. Nothing is asked of the store.

    Raises:
        ValueError: If fsspec does not know the scheme, or the package for it is not installed; naming both.
    """
    text = os.fspath(path)
    if "://" not in text:
        return Path(text)
    text = text.rstrip("/")
    if "::" in text:
        raise ValueError(f"The checkpoint's address {text!r} is a chain. Give one, such as 's3://bucket/a.ckpt'.")
    try:
        fs, inner = url_to_fs(text)
    except ImportError as error:
        raise ValueError(f"The checkpoint's address {text!r} needs a package that is not installed: {error}") from error
    except ValueError as error:
        raise ValueError(f"The checkpoint's address {text!r} is not one that fsspec knows: {error}") from error
    return Path(inner) if isinstance(fs, LocalFileSystem) else Address(text, fs, inner)


@contextmanager
def errors_of_store(files: Files, what: str) -> Iterator[None]:
    """Name the address in an error within, unless it does that: a store's own, such as ``Forbidden``, does not.

    Args:
        files: The address. Errors of the local file system stay as they are.
        what: What could not be done.

    Raises:
        FileNotFoundError, StoreError: If there was such an error.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(files, Address) or str(files) in str(error):
            raise
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else StoreError
        raise kind(f"{str(files)!r} cannot be {what}: {type(error).__name__}: {error}") from error
