"""Replacing a checkpoint at an address, killed before every single request to the store."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from lightning_zeroplus.checkpoint import atomic
from lightning_zeroplus.checkpoint.fragments import Fragment, StoredTensors, save_fragments
from lightning_zeroplus.checkpoint.places.address import Address, StoreError, files_at
from lightning_zeroplus.checkpoint.places.place import LocalPlace, Place, RemotePlace, place_of
from lightning_zeroplus.checkpoint.saving.trainer_state import save_trainer_state
from tests.support.objects import ObjectStore, address, keys

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def requests() -> Iterator[list[str]]:
    """The requests of this test."""
    ObjectStore.requests.clear()
    fsspec.filesystem("objects").invalidate_cache()
    yield ObjectStore.requests
    ObjectStore.before = None


def _save_folder(where: str, content: str) -> None:
    place = place_of(where)
    place.prepare()
    save_fragments(place.staging, [Fragment("w", (0,), (3,), torch.full((3,), float(len(content))))])
    save_trainer_state(place.staging, {"is": content})
    place.commit()


def _save_file(where: str, content: str) -> None:
    place = place_of(where)
    place.prepare()
    place.put(content.encode())


def _content(where: str) -> str:
    found = place_of(where).readable()
    if found.is_file():
        with found.open("rb") as file:
            return file.read().decode()
    with (found / "meta.pt").open("rb") as file:
        content: str = torch.load(file, weights_only=True)["is"]
    assert StoredTensors(found).whole("w").tolist() == [len(content)] * 3
    return content


def _killed_before(request: int, action: Callable[[], None]) -> bool:
    """Fork a process that is killed before its n-th request; whether it was, rather than came to its end."""
    child = os.fork()
    if child == 0:
        left = request

        def count(said: str) -> None:
            nonlocal left
            if left == 0:
                os._exit(9)
            left -= 1

        ObjectStore.before = count
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) in (0, 9)
    return os.WEXITSTATUS(status) == 9


@pytest.mark.sampled
@pytest.mark.parametrize("save", [_save_folder, _save_file])
@pytest.mark.parametrize("before", [_save_folder, _save_file])
def test_killed_before_every_request(
    tmp_path: Path, before: Callable[[str, str], None], save: Callable[[str, str], None]
) -> None:
    where, seen, request, killed, most = address(tmp_path), set(), 0, True, 0
    while killed:
        before(where, "old")
        assert len(keys(tmp_path)) == (4 if before is _save_folder else 1), "the leftovers of the killed save are gone"
        killed = _killed_before(request, lambda: save(where, "newer"))
        found = _content(where)
        assert found in ("old", "newer"), f"a mixture before request {request}"
        assert fsspec.filesystem("objects").isfile(where), "there is no moment without it"
        most = max(most, len(keys(tmp_path)))
        seen.add(found)
        request += 1
    assert seen == {"old", "newer"} and found == "newer"
    assert request >= (5 if save is _save_file else 10)
    assert most == {_save_folder: 4, _save_file: 1}[before] + {_save_folder: 3, _save_file: 0}[save]


@pytest.mark.parametrize("save", [_save_folder, _save_file])
def test_removed_and_killed_before_every_request(tmp_path: Path, save: Callable[[str, str], None]) -> None:
    where, request, killed, left = address(tmp_path), 0, True, set()
    while killed:
        save(where, "old")
        killed = _killed_before(request, lambda: place_of(where).remove())
        found = place_of(where).readable()
        assert not found.exists() or _content(where) == "old"
        left.add(found.exists())
        request += 1
    assert left == {True, False} and not keys(tmp_path)
    place_of(where).remove()  # nothing


def test_what_others_have_listed_is_not_believed(tmp_path: Path, requests: list[str]) -> None:
    """A store's filesystem remembers listings, and others write meanwhile."""
    where = address(tmp_path, "a/last.ckpt")
    store = fsspec.filesystem("objects")
    assert not store.find(where.rpartition("/")[0])
    assert not _killed_before(10**9, lambda: _save_folder(where, "old"))  # in another process
    assert _content(where) == "old"
    assert not _killed_before(10**9, lambda: _save_folder(where, "newer"))
    assert _content(where) == "newer"
    _save_folder(where, "newest")
    assert len(keys(tmp_path)) == 4 and store.exists(where)


def test_requests_of_a_save(tmp_path: Path, requests: list[str]) -> None:
    """The pointer is put last, in one piece; only then the old parts go."""
    where = address(tmp_path)
    _save_folder(where, "old")
    requests.clear()
    _save_folder(where, "newer")
    changes = [each for each in requests if each.split()[0] in ("PUT", "DELETE")]
    at = changes.index("PUT last.ckpt")
    assert sum(each.startswith("PUT") for each in changes[:at]) == 4, "data, metadata twice, and what is not sharded"
    assert [each.split()[0] for each in changes[at + 1 :]] == ["DELETE"] * 3
    assert len(requests) < 30


def test_requests_of_a_load(tmp_path: Path, requests: list[str]) -> None:
    """A file is read from its beginning on, however many parts of tensors are wanted, in whatever order."""
    folder = files_at(address(tmp_path, "folder"))
    parts = [Fragment("w", (start,), (30,), torch.full((1,), float(start))) for start in range(30)]
    save_fragments(folder, parts)
    stored = StoredTensors(folder)
    requests.clear()
    wanted = [part._replace(data=torch.zeros(1)) for part in reversed(parts)]
    stored.read(wanted)
    assert [part.data.item() for part in wanted] == [*range(29, -1, -1)]
    assert [each for each in requests if each.startswith("GET")] == ["GET folder/__0_0.distcp"]


def test_a_pointer_and_its_parts_may_be_copied(tmp_path: Path) -> None:
    """Also to a local folder, which is what a mounted bucket looks like."""
    where = address(tmp_path)
    _save_folder(where, "old")
    store = fsspec.filesystem("objects")
    for key in keys(tmp_path):
        target = tmp_path / "copied" / key
        target.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(address(tmp_path, key), str(target))
        store.pipe_file(address(tmp_path, f"copied/{key}"), target.read_bytes())
    place_of(where).remove()
    assert _content(str(tmp_path / "copied" / "last.ckpt")) == "old"
    assert _content(f"file://{tmp_path}/copied/last.ckpt") == "old"
    assert _content(address(tmp_path, "copied/last.ckpt")) == "old"


def test_a_folder_that_was_uploaded_is_read_and_not_hidden(tmp_path: Path) -> None:
    local = str(tmp_path / "last.ckpt")
    _save_folder(local, "old")
    store = fsspec.filesystem("objects")
    for name in os.listdir(local):
        store.put_file(f"{local}/{name}", address(tmp_path, f"last.ckpt/{name}"))
    assert _content(address(tmp_path)) == "old"
    with pytest.raises(FileExistsError, match=r"objects://.*last\.ckpt' is a folder.*another address"):
        place_of(address(tmp_path)).prepare()
    place_of(address(tmp_path)).remove()
    assert not keys(tmp_path)


def test_only_parts_of_checkpoints_are_removed(tmp_path: Path) -> None:
    where, store = address(tmp_path), fsspec.filesystem("objects")
    store.pipe_file(f"{where}.parts/mine/data", b"precious")
    _save_folder(where, "old")
    _save_folder(where, "newer")
    place_of(where).remove()
    assert keys(tmp_path) == ["last.ckpt.parts/mine/data"]


@pytest.mark.parametrize("content", [b"", b'"broken', b', "format": 2, "unique": "' + b"a" * 32 + b'"}', b"}"])
def test_a_damaged_pointer(tmp_path: Path, content: bytes) -> None:
    """It is not read; the next save replaces it."""
    where, store = address(tmp_path), fsspec.filesystem("objects")
    _save_folder(where, "old")
    store.pipe_file(where, b'{"zeroplus": "parts"' + content)
    with pytest.raises(RuntimeError, match=r"objects://.*last\.ckpt' (is damaged|has format 2)"):
        place_of(where).readable()
    _save_folder(where, "newer")
    assert _content(where) == "newer" and len(keys(tmp_path)) == 4


def test_a_pointer_names_nothing_outside_of_its_parts(tmp_path: Path) -> None:
    where = address(tmp_path)
    pointer = json.dumps({"zeroplus": "parts", "format": 1, "unique": "../../elsewhere"})
    fsspec.filesystem("objects").pipe_file(where, pointer.encode())
    with pytest.raises(RuntimeError, match="cannot read"):
        place_of(where).readable()


def test_errors_of_the_store_name_the_address(tmp_path: Path) -> None:
    where = address(tmp_path)
    _save_folder(where, "old")

    refused = ""

    def refuse(said: str) -> None:
        if said.split()[0] == refused:
            raise PermissionError("Forbidden")

    ObjectStore.before = refuse
    for each in ("HEAD", "PUT"):
        refused = each
        with pytest.raises(StoreError, match=r"objects://.*last\.ckpt' cannot be written: PermissionError: Forbidden"):
            _save_file(where, "newer")
    refused = "GET"
    with pytest.raises(StoreError, match=r"objects://.*last\.ckpt' cannot be read: PermissionError: Forbidden"):
        _content(where)
    refused = "DELETE"  # a bucket that keeps everything: the new checkpoint is good
    _save_folder(where, "newer")
    refused = "nothing"
    assert _content(where) == "newer" and len(keys(tmp_path)) == 8
    _save_folder(where, "newest")
    assert len(keys(tmp_path)) == 4


def test_a_failed_save_is_discarded(tmp_path: Path) -> None:
    where = address(tmp_path)
    _save_folder(where, "old")
    place = place_of(where)
    place.prepare()
    save_trainer_state(place.staging, {"is": "newer"})
    assert len(keys(tmp_path)) == 5
    place.discard()
    assert len(keys(tmp_path)) == 4 and _content(where) == "old"


@pytest.mark.parametrize("save", [_save_folder, _save_file])
def test_a_store_with_folders(save: Callable[[str, str], None]) -> None:
    """Such as fsspec's in memory."""
    store, where = fsspec.filesystem("memory"), "memory://a/b/last.ckpt"
    for content in ("old", "newer"):
        save(where, content)
        assert _content(where) == content and len(store.find("/a")) == (4 if save is _save_folder else 1)
    place_of(where).remove()
    assert store.find("/a") == [] and store.ls("/a/b") == []


def test_which_addresses_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for local in (str(tmp_path), f"file://{tmp_path}", f"local://{tmp_path}", tmp_path):
        place: Place = place_of(local)
        assert isinstance(place, LocalPlace) and place.path == tmp_path
        assert place.staging == atomic.staging(tmp_path)
    with pytest.raises(ValueError, match=r"'nonsense://a/b' is not one that fsspec knows.*nonsense"):
        place_of("nonsense://a/b")
    with pytest.raises(ValueError, match=r"'simplecache::s3://a/b' is a chain"):
        place_of("simplecache::s3://a/b")
    fsspec.register_implementation("lacking", "package_that_is_not_there.Store", errtxt="Install lacking-fs")
    with pytest.raises(ValueError, match=r"'lacking://a/b' needs a package.*Install lacking-fs"):
        place_of("lacking://a/b")
    found = files_at("memory://a/b/last.ckpt/")
    assert isinstance(found, Address) and isinstance(place_of("memory://a"), RemotePlace)
    assert (str(found), found.name, found.suffix) == ("memory://a/b/last.ckpt", "last.ckpt", ".ckpt")
    assert (
        str(found / "meta.pt") == "memory://a/b/last.ckpt/meta.pt" == str(pickle.loads(pickle.dumps(found / "meta.pt")))
    )
    assert str(found.with_name("other")) == "memory://a/b/other" and found.with_name("other").path == "/a/b/other"
