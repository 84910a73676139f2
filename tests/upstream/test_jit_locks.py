"""Locks of JIT-built operators: dead builders' are removed, live builders' are waited for aloud."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from lightning_zeroplus.engine.upstream import jit_locks
from lightning_zeroplus.engine.upstream.jit_locks import (
    extensions_root,
    find_locks,
    remove_stale_locks,
    watch_jit_locks,
)

DEADLINE_S = 30.0
OP = "cpu_adam"

# torch's own FileBaton, loaded from its file: importing torch would take seconds.
HOLDER = """
import runpy, sys, time
baton = runpy.run_path(sys.argv[1])["FileBaton"](sys.argv[2])
print(baton.try_acquire(), flush=True)
sys.stdin.read()
baton.release()
"""

Builder = Callable[[Path], "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def local_filesystem(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is tested is not where this machine keeps its temporary files.
    monkeypatch.setattr(jit_locks, "_may_be_held_unseen", lambda path: False)
    # Nor which of torch's two kinds of locks this one has: these tests take those of before 2.14.
    monkeypatch.setattr(jit_locks, "_is_lock_by_itself", lambda: True)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / OP / "lock"
    path.parent.mkdir()
    return path


@pytest.fixture
def builder() -> Iterator[Builder]:
    """Starts processes that take a lock as torch does, and hold it until their input is closed."""
    spec = importlib.util.find_spec("torch.utils.file_baton")
    assert spec is not None and spec.origin is not None
    started: list[subprocess.Popen[str]] = []

    def start(lock: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(spec.origin), str(lock)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "True"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def dead_lock(lock: Path, builder: Builder) -> Path:
    kill(builder(lock))
    return lock


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(DEADLINE_S)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def start_waiter(lock: Path) -> threading.Thread:
    """A process that came second: it waits in torch."""
    baton = FileBaton(str(lock), wait_seconds=0.01)
    assert not baton.try_acquire()
    waiter = threading.Thread(target=baton.wait, daemon=True)
    waiter.start()
    return waiter


def test_no_locks_no_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find_locks(tmp_path) == [] == find_locks(tmp_path / "missing")
    with watch_jit_locks(is_local_leader=True, root=tmp_path, poll_s=0.01, report_after_s=0.0):
        pass
    assert caplog.records == []


def test_dead_builders_lock_is_removed_before_the_body(tmp_path: Path, dead_lock: Path) -> None:
    with pytest.warns(UserWarning, match=f"{OP!r}.*is gone"):
        with watch_jit_locks(is_local_leader=True, root=tmp_path):
            assert FileBaton(str(dead_lock)).try_acquire()


def test_a_file_that_stays_is_no_lock(
    tmp_path: Path, lock: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From torch 2.14 on: only a process that has the file open has the lock."""
    monkeypatch.setattr(jit_locks, "_is_lock_by_itself", lambda: False)
    process = builder(lock)
    assert [found.holders for found in find_locks(tmp_path)] == [(process.pid,)]
    kill(process)
    assert lock.exists() and find_locks(tmp_path) == []
    with watch_jit_locks(is_local_leader=True, root=tmp_path, poll_s=0.01, report_after_s=0.0):
        pass  # a warning would be an error
    assert lock.exists()


def test_the_kind_of_lock_is_the_installed_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    source = inspect.getsource(cpp_extension)
    assert jit_locks._is_lock_by_itself() is ("FileBaton(" in source)
    assert ("FileBaton(" in source) is not ("FileLock(" in source)


def test_builder_that_dies_while_another_waits(tmp_path: Path, lock: Path, builder: Builder) -> None:
    process = builder(lock)
    with pytest.warns(UserWarning, match=OP):
        with watch_jit_locks(is_local_leader=True, root=tmp_path, poll_s=0.05):
            waiter = start_waiter(lock)
            process.kill()  # not waited for: a zombie holds nothing
            waiter.join(DEADLINE_S)
    assert not waiter.is_alive()
    assert not lock.exists()


def test_live_builder_is_reported_and_waited_for(
    tmp_path: Path, lock: Path, builder: Builder, caplog: pytest.LogCaptureFixture
) -> None:
    process = builder(lock)
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        with watch_jit_locks(is_local_leader=True, root=tmp_path, poll_s=0.02, report_after_s=0.1):
            waiter = start_waiter(lock)
            wait_until(lambda: caplog.records)
            assert lock.exists() and waiter.is_alive()
            process.communicate()
            waiter.join(DEADLINE_S)
    assert not waiter.is_alive()
    (message,) = caplog.messages  # once, not at every look
    assert repr(OP) in message and f"process {process.pid}" in message and str(lock) in message


def test_the_builder_itself_is_not_told_of_its_lock(
    tmp_path: Path, lock: Path, caplog: pytest.LogCaptureFixture
) -> None:
    baton = FileBaton(str(lock))
    assert baton.try_acquire()
    watch = jit_locks._Watch(tmp_path, is_local_leader=True, report_after_s=0.0)
    assert [found.holders for found in watch.look()] == [(os.getpid(),)]
    baton.release()
    assert caplog.records == []


def test_only_the_local_leader_removes(
    tmp_path: Path, dead_lock: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit_locks, "_LEADER_GRACE_S", 0.1)
    with watch_jit_locks(is_local_leader=False, root=tmp_path, poll_s=0.02, report_after_s=0.0):
        assert dead_lock.exists()
    assert "stale lock" in caplog.text


def test_other_ranks_enter_after_the_leader_removed(tmp_path: Path, dead_lock: Path) -> None:
    seen: list[bool] = []

    def other_rank() -> None:
        with watch_jit_locks(is_local_leader=False, root=tmp_path, poll_s=0.01):
            seen.append(dead_lock.exists())

    rank = threading.Thread(target=other_rank, daemon=True)
    rank.start()
    with pytest.warns(UserWarning, match=OP):
        with watch_jit_locks(is_local_leader=True, root=tmp_path):
            rank.join(DEADLINE_S)
    assert seen == [False]


def test_lock_created_anew_is_not_removed(tmp_path: Path, dead_lock: Path) -> None:
    found = find_locks(tmp_path)
    assert [lock.stale for lock in found] == [True]
    dead_lock.unlink()
    dead_lock.touch()  # without a holder, so that only its identity protects it
    assert remove_stale_locks(found) == []
    assert dead_lock.exists()


def test_lock_created_anew_just_before_removal_is_not_removed(
    tmp_path: Path, dead_lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_then_lose_the_race(lock: jit_locks.JitLock) -> bool:
        dead_lock.unlink()
        dead_lock.touch()
        return True

    monkeypatch.setattr(jit_locks, "_is_still_stale", check_then_lose_the_race)
    assert remove_stale_locks(find_locks(tmp_path)) == []
    assert dead_lock.exists()


def test_lock_that_its_builder_is_about_to_remove_is_left_to_it(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baton: Any = FileBaton(str(lock))
    assert baton.try_acquire()
    os.close(baton.fd)  # the first half of FileBaton.release
    baton.fd = None
    found = find_locks(tmp_path)
    assert [one.stale for one in found] == [True]
    # The second half, while we wait to look again; it raises if somebody else removed the file.
    monkeypatch.setattr(jit_locks.time, "sleep", lambda seconds: baton.release())
    assert remove_stale_locks(found) == []


def test_two_removers_remove_a_lock_once(tmp_path: Path, dead_lock: Path) -> None:
    found = find_locks(tmp_path)
    removed: list[jit_locks.JitLock] = []
    removers = [threading.Thread(target=lambda: removed.extend(remove_stale_locks(found))) for _ in range(4)]
    for remover in removers:
        remover.start()
    for remover in removers:
        remover.join(DEADLINE_S)
    assert len(removed) <= 1  # none if each took the others, who had the file open to look at it, for a holder
    assert dead_lock.exists() == (not removed)


@pytest.mark.parametrize(
    ("status", "owner", "name", "alive"),
    [
        (psutil.STATUS_SLEEPING, os.getuid(), "python3.11", True),
        (psutil.STATUS_SLEEPING, os.getuid(), "pt_main_thread", True),
        (psutil.STATUS_SLEEPING, os.getuid(), "sshd", False),
        (psutil.STATUS_SLEEPING, os.getuid() + 1, "python3.11", False),
        (psutil.STATUS_ZOMBIE, os.getuid(), "python3.11", False),
    ],
)
def test_process_that_may_not_be_inspected(
    dead_lock: Path, monkeypatch: pytest.MonkeyPatch, status: str, owner: int, name: str, alive: bool
) -> None:
    process = SimpleNamespace(status=lambda: status, uids=lambda: (owner,) * 3, name=lambda: name, cmdline=lambda: [])

    def refuse(pid: int, status: os.stat_result) -> bool:
        raise PermissionError

    monkeypatch.setattr(jit_locks, "_has_open", refuse)
    monkeypatch.setattr(psutil, "pids", lambda: [4])
    monkeypatch.setattr(psutil, "Process", lambda pid: process)
    (found,) = find_locks(dead_lock.parent.parent)
    assert found.stale is not alive
    assert found.holders == ((4,) if alive else ())


def test_ninja_that_outlives_its_parent_is_a_holder(tmp_path: Path, dead_lock: Path) -> None:
    tool = tmp_path / "ninja"
    tool.symlink_to("/bin/sleep")
    orphan = subprocess.Popen([str(tool), str(DEADLINE_S)], cwd=dead_lock.parent)
    try:
        wait_until(lambda: psutil.Process(orphan.pid).name() == "ninja")
        assert [lock.holders for lock in find_locks(tmp_path)] == [(orphan.pid,)]
    finally:
        orphan.kill()
        orphan.wait(DEADLINE_S)
    assert [lock.stale for lock in find_locks(tmp_path)] == [True]


def test_folder_that_other_hosts_may_share_has_to_be_quiet(
    tmp_path: Path, dead_lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit_locks, "_may_be_held_unseen", lambda path: True)
    assert [lock.stale for lock in find_locks(tmp_path)] == [False]
    monkeypatch.setattr(jit_locks, "_SHARED_QUIET_S", 0.0)
    assert [lock.stale for lock in find_locks(tmp_path)] == [True]


@pytest.mark.parametrize(("fstype", "unseen"), [("ext4", False), ("nfs4", True), ("fuse.sshfs", True)])
def test_filesystem_of_the_innermost_mount_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fstype: str, unseen: bool
) -> None:
    monkeypatch.undo()
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="overlay"),
        SimpleNamespace(mountpoint=os.path.realpath(tmp_path), fstype=fstype),
        SimpleNamespace(mountpoint=os.path.realpath(tmp_path) + "-other", fstype="proc"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert jit_locks._may_be_held_unseen(tmp_path / OP / "lock") is unseen


def test_file_that_is_not_a_lock_is_left_alone(tmp_path: Path, lock: Path) -> None:
    lock.write_text("not torch's: its locks are empty")
    assert find_locks(tmp_path) == []


def test_warning_made_an_error_is_raised_in_the_main_thread(tmp_path: Path, lock: Path, builder: Builder) -> None:
    process = builder(lock)
    with pytest.raises(UserWarning, match=OP), warnings.catch_warnings():
        warnings.simplefilter("error")
        with watch_jit_locks(is_local_leader=True, root=tmp_path, poll_s=0.02):
            kill(process)
            wait_until(lambda: not lock.exists())


def test_root_is_where_torch_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path / "default"))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert extensions_root() == Path(cpp_extension._get_build_directory(OP, verbose=False)).parent
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "chosen"))
    assert extensions_root() == tmp_path / "chosen"
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "below"))
    assert extensions_root() is None


def test_torch_locks_where_we_look_and_keeps_the_lock_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upstream behaviour that all of this relies on; only the compiler is replaced."""
    found: list[jit_locks.JitLock] = []
    monkeypatch.undo()
    monkeypatch.setattr(jit_locks, "_may_be_held_unseen", lambda path: False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(
        cpp_extension, "_write_ninja_file_and_build_library", lambda **kwargs: found.extend(find_locks())
    )
    source = tmp_path / "source.cpp"
    source.touch()
    with pytest.raises(ImportError):
        cpp_extension.load(name="zeroplus_probe", sources=[str(source)])
    assert [(lock.op, lock.holders, lock.stale) for lock in found] == [("zeroplus_probe", (os.getpid(),), False)]
    assert find_locks() == []
