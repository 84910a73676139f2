"""Replace a file or a folder so that a kill at any moment leaves the old one or the new one.

The new one is written next to the old one, as ``.NAME.saving``, flushed to the disk, and renamed to ``NAME``. A rename
replaces a file atomically. No rename replaces a folder that is not empty; Linux exchanges two folders atomically
(``renameat2`` with ``RENAME_EXCHANGE``), and what is then called ``.NAME.saving`` is the old one. Where the kernel or
the file system cannot exchange (NFS, macOS), two renames must do: the old one is called ``.NAME.previous`` in between,
and whoever reads looks there (:func:`readable`). The exchange comes first because it leaves no moment without ``NAME``
for whoever does not know of the second name.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

# What a folder has that is a checkpoint, of ours or of DeepSpeed.
_OF_CHECKPOINTS = (".metadata", "meta.pt", "latest")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


def staging(path: Path) -> Path:
    """Where to write what :func:`commit` then calls ``path``."""
    return path.with_name(f".{path.name}.saving")


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def readable(path: Path) -> Path:
    """``path``, or where its content is if a save was killed between two renames."""
    return _previous(path) if not path.exists() and _previous(path).exists() else path


def prepare(path: Path) -> Path:
    """Remove what a killed save has left of ``path``, and return where to write.

    Raises:
        FileExistsError: If ``path`` is a folder with anything but a checkpoint.
        OSError: If the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and any(path.iterdir()) and not any((path / name).exists() for name in _OF_CHECKPOINTS):
        raise FileExistsError(f"{str(path)!r} is a folder, and no checkpoint: saving would replace it. Name another.")
    if readable(path) != path:
        os.rename(_previous(path), path)
    for leftover in (staging(path), _previous(path)):
        _remove(leftover)
    return staging(path)


def commit(path: Path) -> None:
    """Put what :func:`staging` holds in the place of ``path``, and remove what was there."""
    new = staging(path)
    sync(new)
    if path.is_dir() or (path.exists() and new.is_dir()):
        _swap(new, path)
    else:
        os.replace(new, path)
    flush(path.parent)
    for old in (new, _previous(path)):
        _remove(old)


def discard(path: Path) -> None:
    """Remove what has been written beside ``path``, if that can be done: a save has failed, of a full disk perhaps."""
    with suppress(OSError):
        _remove(staging(path))


def remove(path: Path) -> None:
    """Remove ``path``, so that a kill leaves it whole or gone, but for a hidden rest."""
    if not path.is_symlink() and path.is_dir():
        hidden = staging(path)
        _remove(hidden)
        os.rename(path, hidden)
        path = hidden
    _remove(path)


def _swap(new: Path, path: Path) -> None:
    if not _exchange(new, path):
        os.rename(path, _previous(path))
        os.rename(new, path)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically, if the system can."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if not renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return True
    code = ctypes.get_errno()
    if code not in _CANNOT_EXCHANGE:
        raise OSError(code, os.strerror(code), str(one), None, str(other))
    return False


def sync(path: Path) -> None:
    """Flush a file, or a folder and the files in it, to the disk."""
    if path.is_dir():
        for folder, _, files in os.walk(path):
            for name in files:
                flush(Path(folder, name))
            flush(Path(folder))
    else:
        flush(path)


def flush(path: Path) -> None:
    """Flush the content of a file to the disk, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def local_path(path: str | Path) -> Path:
    """``path``, unless it is the address of a remote file.

    Raises:
        ValueError: Naming the address.
    """
    if "://" in str(path):
        raise ValueError(f"The checkpoint {str(path)!r} is not on a local or mounted file system, and must be.")
    return Path(path)
