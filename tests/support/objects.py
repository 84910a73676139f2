"""An object store in a folder, for all processes of a test: ``objects:///tmp/any/name.store/KEY``.

It is as strict as S3: one flat list of keys, no folders, no renames, no copies; an object is there, whole, when it is
closed. Like s3fs it remembers what it has listed until it is told to forget it, although others may have written.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

PROTOCOL = "objects"


def address(folder: Path, key: str = "last.ckpt") -> str:
    """The address of an object in the store of a folder."""
    return f"{PROTOCOL}://{folder}/bucket.store/{key}"


def keys(folder: Path) -> list[str]:
    """All keys in the store of a folder."""
    root = folder / "bucket.store"
    return sorted(unquote(name) for name in os.listdir(root)) if root.exists() else []


class ObjectStore(AbstractFileSystem):
    """The store, with all requests of this process.

    Attributes:
        requests: What has been asked, as ``"PUT key"``, and so on.
        before: Called before each request.
    """

    protocol = PROTOCOL
    requests: list[str] = []
    before: Callable[[str], None] | None = None

    @classmethod
    def request(cls, what: str, path: str) -> Path:
        root, _, key = path.partition(".store/")
        said = f"{what} {key}"
        if cls.before is not None:
            cls.before(said)
        cls.requests.append(said)
        return Path(f"{root}.store", quote(key, safe=""))

    def _head(self, path: str) -> dict[str, Any] | None:
        file = self.request("HEAD", path)
        return _described(path, file) if file.exists() else None

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        known = [each for each in self._ls_from_cache(path) or () if each["name"] == path]
        found = known[0] if known else self._head(path)
        if found is None and self._listed(path):
            found = {"name": path, "size": 0, "type": "directory"}
        if found is None:
            raise FileNotFoundError(path)
        return found

    def _listed(self, path: str) -> list[dict[str, Any]]:
        """The objects and the common prefixes below a prefix."""
        cached = self.dircache.get(path)
        if cached is not None:
            return list(cached)
        root = self.request("LIST", f"{path}/").parent
        base = path.partition(".store")[0] + ".store/"
        found: dict[str, dict[str, Any]] = {}
        for name in sorted(os.listdir(root)) if root.exists() else ():
            full = base + unquote(name)
            if full.startswith(f"{path}/"):
                own, more, _ = full.removeprefix(f"{path}/").partition("/")
                below = f"{path}/{own}"
                found[below] = (
                    {"name": below, "size": 0, "type": "directory"} if more else _described(full, root / name)
                )
        self.dircache[path] = list(found.values())
        return list(found.values())

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        found = self._listed(path) or [self.info(path)]
        return found if detail else [each["name"] for each in found]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def modified(self, path: str) -> datetime:
        found = self.info(path)
        if "LastModified" not in found:
            raise IsADirectoryError(path)
        return found["LastModified"]  # type: ignore[no-any-return]

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None: ...

    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...

    def rmdir(self, path: str) -> None:
        raise FileNotFoundError(path)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        raise NotImplementedError("this store does not copy")

    def mv(self, path1: str, path2: str, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("this store does not rename")

    def _rm(self, path: str) -> None:
        self.request("DELETE", path).unlink(missing_ok=True)
        self.invalidate_cache()

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        path = self._strip_protocol(path)
        for each in self.find(path) if recursive else [path]:
            self._rm(each)

    def put_object(self, path: str, content: bytes) -> None:
        file = self.request("PUT", path)
        file.parent.mkdir(exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=file.parent.parent)
        with open(descriptor, "wb") as stream:
            stream.write(content)
        os.replace(temporary, file)
        self.invalidate_cache()

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> _Object:
        kwargs.pop("autocommit", None)
        return _Object(self, path, mode, block_size=block_size or "default", **kwargs)


class _Object(AbstractBufferedFile):
    def _initiate_upload(self) -> None:
        self.chunks: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.chunks.append(self.buffer.getvalue())
        if final:
            self.fs.put_object(self.path, b"".join(self.chunks))
        return True

    def _fetch_range(self, start: int, end: int) -> bytes:
        with open(self.fs.request("GET", self.path), "rb") as file:
            file.seek(start)
            return file.read(end - start)


def _described(path: str, file: Path) -> dict[str, Any]:
    found = file.stat()
    modified = datetime.fromtimestamp(found.st_mtime, timezone.utc)
    return {"name": path, "size": found.st_size, "type": "file", "LastModified": modified}


def register() -> None:
    """Let fsspec know the store, in this process."""
    fsspec.register_implementation(PROTOCOL, ObjectStore, clobber=True)


register()
