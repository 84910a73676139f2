"""Replacing a file or a folder, killed at every single thing that it does to the file system."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_zeroplus.checkpoint import atomic

_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "ctypes.dlsym")


def _save_folder(path: Path, content: str) -> None:
    staging = atomic.prepare(path)
    staging.mkdir()
    for name in ("meta.pt", ".metadata"):
        (staging / name).write_text(content)
    atomic.commit(path)


def _save_file(path: Path, content: str) -> None:
    atomic.prepare(path).write_text(content)
    atomic.commit(path)


def _content(path: Path) -> set[str]:
    path = atomic.readable(path)
    return {file.read_text() for file in path.iterdir()} if path.is_dir() else {path.read_text()}


def _killed_at(event: int, action: Callable[[], None]) -> bool:
    """Fork a process that is killed at its n-th event; whether it was, rather than came to its end."""
    child = os.fork()
    if child == 0:
        left = event

        def hear(name: str, arguments: object) -> None:
            nonlocal left
            if name in _EVENTS:
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        sys.addaudithook(hear)
        action()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.sampled
@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("save", [_save_folder, _save_file])
def test_killed_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool, save: Callable[[Path, str], None]
) -> None:
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    path, seen, event = tmp_path / "last.ckpt", set(), 0
    while True:
        save(path, "old")
        assert os.listdir(tmp_path) == ["last.ckpt"], "the leftovers of the killed save are gone"
        killed = _killed_at(event, lambda: save(path, "new"))
        found = _content(path)
        assert found in ({"old"}, {"new"}), f"a mixture after event {event}"
        if exchange or save is _save_file:
            assert path.exists(), "there is no moment without it"
        seen |= found
        event += 1
        if not killed:
            break
    assert event >= 6 and seen == {"old", "new"} and found == {"new"}


def test_killed_again_after_a_kill_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    path, event, killed = tmp_path / "last.ckpt", 0, True
    while killed:
        _save_folder(path, "old")
        path.rename(atomic._previous(path))
        killed = _killed_at(event, lambda: _save_folder(path, "new"))
        assert _content(path) in ({"old"}, {"new"})
        event += 1
    assert event >= 8


def test_the_system_exchanges_folders(tmp_path: Path) -> None:
    """Otherwise the case above would test the same thing twice."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    if not atomic._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange two folders")
    assert (tmp_path / "a" / "content").read_text() == "b"


def test_a_folder_replaces_a_file_and_a_link(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_text("old")
    _save_folder(path, "new")
    assert _content(path) == {"new"}
    _save_file(path, "newer")
    assert _content(path) == {"newer"}
    other = tmp_path / "other.ckpt"
    _save_folder(other, "linked")
    path.unlink()
    path.symlink_to(other.name)
    _save_folder(path, "own")
    assert _content(path) == {"own"} and _content(other) == {"linked"}
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "other.ckpt"]


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "precious").write_text("data")
    with pytest.raises(FileExistsError, match=r"results' is not a checkpoint"):
        atomic.prepare(tmp_path / "results")
    assert _content(tmp_path / "results") == {"data"}


def test_remove(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    event = 0
    while True:
        _save_folder(path, "old")
        killed = _killed_at(event, lambda: atomic.remove(path))
        assert not path.exists() or (path / "meta.pt").exists() and (path / ".metadata").exists()
        event += 1
        if not killed:
            break
    assert event >= 3 and not os.listdir(tmp_path)
