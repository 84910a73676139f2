"""Replace a file or a folder so that a kill at any moment leaves the old one or the new one.

The new one is written next to the old one, as ``.NAME.saving``, flushed to the disk, and renamed to ``NAME``. A rename
replaces a file atomically, but it cannot replace a folder that is not empty. Linux exchanges two folders atomically
(``renameat2`` with ``RENAME_EXCHANGE``); afterwards ``.NAME.saving`` is the old one. Where the kernel or the file
system cannot exchange (NFS, macOS), two renames do it: in between, the old one is called ``.NAME.previous``, and
:func:`readable` finds it there. The exchange is preferred because other readers always find ``NAME``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

# Files by which a folder is recognized as a checkpoint, of this package or of DeepSpeed.
_OF_CHECKPOINTS = (".metadata", "meta.pt", "latest")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


def staging(path: Path) -> Path:
    """Where to write the new content, which :func:`commit` renames to ``path``."""
    return path.with_name(f".{path.name}.saving")


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def readable(path: Path) -> Path:
    """``path``, or the place of its content if a save was killed between two renames."""
    return _previous(path) if not path.exists() and _previous(path).exists() else path


def prepare(path: Path) -> Path:
    """Clean up after a killed save of ``path``, and return where to write.

    Raises:
        FileExistsError: If ``path`` is a folder that is neither empty nor a checkpoint.
        OSError: If the parent folder cannot be made, or leftovers cannot be renamed or removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and any(path.iterdir()) and not any((path / name).exists() for name in _OF_CHECKPOINTS):
        raise FileExistsError(
            f"The folder {str(path)!r} is not a checkpoint, and saving would replace it. Save to another path."
        )
    if readable(path) != path:
        os.rename(_previous(path), path)
    for leftover in (staging(path), _previous(path)):
        _remove(leftover)
    return staging(path)


def commit(path: Path) -> None:
    """Replace ``path`` by the content of :func:`staging`, and remove the old content."""
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
    """Remove the new content after a failed save. Ignores errors: the disk may be full."""
    with suppress(OSError):
        _remove(staging(path))


def remove(path: Path) -> None:
    """Remove ``path``. A kill leaves it whole or gone, except for a hidden leftover."""
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
    """Exchange two names atomically; return False if the system cannot."""
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
