"""Locks of JIT-built operators: wait while the builder lives, remove the lock once it is dead.

DeepSpeed builds operators through ``torch.utils.cpp_extension``, which guards each build with a ``FileBaton``: a file
``lock`` in the operator's folder. The builder creates it exclusively, keeps it open and removes it at the end. A
builder that is killed leaves the file, and every later run silently waits for ever. The file does not name its owner;
but if no running process has it open, it has none.

From torch 2.14 on the guard is a lock of the operating system on that file, which ends with the process that has it.
The file stays for ever and is no lock by itself, unless a process has it open.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import stat
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_log = logging.getLogger(__name__)

# A builder closes its lock a moment before it removes it: a lock without a holder is checked again after this time.
_CONFIRM_S = 0.2
# How long a folder must be untouched if other hosts may share it, because their processes cannot be seen.
_SHARED_QUIET_S = 900.0
# How long a rank waits for the local leader to remove stale locks before it goes on.
_LEADER_GRACE_S = 30.0
_REPORT_AGAIN_S = 60.0
_LOCAL_FILESYSTEMS = frozenset(
    "apfs aufs bcachefs btrfs ecryptfs ext2 ext3 ext4 f2fs hfs overlay ramfs rootfs tmpfs ufs xfs zfs".split()
)


@dataclass(frozen=True)
class JitLock:
    """The lock of one operator, as found at one time."""

    #: Name of the operator, which is the name of its folder.
    op: str
    #: The lock file.
    path: Path
    #: Ids of the running processes that have the file open, or may have it open: see :func:`find_locks`.
    holders: tuple[int, ...]
    #: Seconds since the file was created.
    age_s: float
    #: Whether the builder is known to be gone, so that the lock may be removed.
    stale: bool
    #: Device, inode and modification time. A lock that is created again has another identity.
    identity: tuple[int, int, int]


def extensions_root() -> Path | None:
    """The folder whose subfolders hold this interpreter's JIT-built operators; None if it cannot be created."""
    from torch.utils.cpp_extension import _get_build_directory

    with suppress(OSError):
        root = _get_build_directory("", verbose=False)  # creates the folder, as any build would
        return Path(root) if root else None
    return None


@functools.cache
def _is_lock_by_itself() -> bool:
    """Whether torch takes the file for a lock that no process has open."""
    from torch.utils import cpp_extension

    return hasattr(cpp_extension, "FileBaton")


def find_locks(root: Path | None = None) -> list[JitLock]:
    """Look at the locks of all operators below ``root``, ordered by operator.

    A process holds a lock if it has the file open, or if it is a ``ninja`` that works in the operator's folder: it may
    have survived its parent. A Python process of the lock's owner that may not be inspected counts as a holder too.
    On a filesystem that other hosts may share, a lock without a holder is stale only once nothing in its folder has
    changed for 15 minutes. Processes of other containers that share the folder are not seen.

    Args:
        root: The folder of the operators' folders; by default :func:`extensions_root`.
    """
    root = extensions_root() if root is None else root
    return [] if root is None else _find_locks(root, {})


def _find_locks(root: Path, known: Mapping[Path, tuple[int, ...]]) -> list[JitLock]:
    try:
        folders = sorted(entry.path for entry in os.scandir(root))
    except OSError:
        return []  # no such folder: nothing was ever built
    paths = (Path(folder, "lock") for folder in folders)
    locks = (_look_at(path, known.get(path, ())) for path in paths)
    return [lock for lock in locks if lock is not None]


def remove_stale_locks(locks: Iterable[JitLock]) -> list[JitLock]:
    """Remove the stale ones of ``locks``, and return what was removed.

    A lock that was released, or created anew, in the meantime is left alone. Only one process of a machine should do
    this for a folder; if several do, each lock is removed once.
    """
    suspects = [lock for lock in locks if lock.stale]
    if not suspects:
        return []
    time.sleep(_CONFIRM_S)
    return [lock for lock in suspects if _is_still_stale(lock) and _remove(lock)]


@contextmanager
def watch_jit_locks(
    *, is_local_leader: bool, root: Path | None = None, poll_s: float = 0.5, report_after_s: float = 5.0
) -> Iterator[None]:
    """Watch the locks while the body builds operators, so that it never waits silently or for a dead builder.

    Stale locks are removed before the body starts, and by a thread while it runs, which also frees a process that
    already waits in torch. Locks of live builders are left alone; waiting for one is logged. Without any lock, the cost
    is a directory listing every ``poll_s`` seconds.

    Args:
        is_local_leader: Whether this process removes stale locks; True for one rank of each machine. The others wait
            for it and report.
        root: See :func:`find_locks`.
        poll_s: Seconds between two checks.
        report_after_s: Seconds after which waiting for a lock is first logged.

    Warns:
        UserWarning: For each removed lock, naming the operator.
    """
    root = extensions_root() if root is None else root
    if root is None:
        yield
        return
    watch = _Watch(root, is_local_leader, report_after_s)
    deadline = time.monotonic() + _LEADER_GRACE_S
    while any(lock.stale for lock in watch.look()) and time.monotonic() < deadline:
        # Entering now would wait in torch, which then expects to find the operator built.
        time.sleep(poll_s)
    done = threading.Event()
    thread = threading.Thread(target=watch.run, args=(done, poll_s), name="jit-lock-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if watch.raised is not None:
        raise watch.raised


class _Watch:
    """What one process knows, and has reported, about the locks below ``root``."""

    def __init__(self, root: Path, is_local_leader: bool, report_after_s: float) -> None:
        self.root = root
        self.is_local_leader = is_local_leader
        self.report_after_s = report_after_s
        self.raised: Warning | None = None  # a warning that the user's filters turn into an error, for the main thread
        self._holders: dict[Path, tuple[int, ...]] = {}
        self._seen: dict[tuple[int, int, int], float] = {}
        self._reported: dict[tuple[int, int, int], float] = {}

    def run(self, done: threading.Event, poll_s: float) -> None:
        pause = poll_s
        while not done.wait(pause):
            start = time.monotonic()
            try:
                self.look()
            except Warning as warning:
                self.raised = self.raised or warning
            # With thousands of processes a check takes long, and must not slow down the builds.
            pause = max(poll_s, min(5.0, 10 * (time.monotonic() - start)))

    def look(self) -> list[JitLock]:
        """Check once: remove stale locks, report the others, and return those."""
        locks = _find_locks(self.root, self._holders)
        self._holders = {lock.path: lock.holders for lock in locks}
        removed = remove_stale_locks(locks) if self.is_local_leader else []
        locks = [lock for lock in locks if lock not in removed]
        for lock in locks:
            self._report(lock)
        for lock in removed:
            warnings.warn(
                f"Removed the lock of the JIT-built op {lock.op!r}: the process that was building it {lock.age_s:.0f} s"
                f" ago is gone ({lock.path}). A process that was waiting for that build may now fail to load the op:"
                " start it again.",
                stacklevel=1,
            )
        return locks

    def _report(self, lock: JitLock) -> None:
        now = time.monotonic()
        waited = now - self._seen.setdefault(lock.identity, now)
        last = self._reported.get(lock.identity)
        due = waited >= self.report_after_s and (last is None or now - last >= _REPORT_AGAIN_S)
        if not due or os.getpid() in lock.holders:
            return
        self._reported[lock.identity] = now
        if lock.holders:
            state = f"is being built by process {', '.join(map(str, lock.holders))}"
        elif not lock.stale:
            state = "is locked by a process that this machine cannot see: another host may share the folder"
        elif self.is_local_leader:
            state = "has a stale lock that cannot be removed: delete the file"
        else:
            state = "has a stale lock, which this machine's first rank has not removed yet: if it is gone, start again"
        _log.warning("The JIT-built op %r %s (seen for %.0f s; lock: %s).", lock.op, state, waited, lock.path)


def _look_at(path: Path, known: Iterable[int] = ()) -> JitLock | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size:
        return None  # torch's lock is an empty file; this is something else
    # The previous holders are checked first: as long as one holds the lock, no other process needs a check.
    holders = tuple(pid for pid in known if _holds(pid, path, status))
    holders = holders or tuple(pid for pid in psutil.pids() if _holds(pid, path, status))
    if not holders and not _is_lock_by_itself():
        return None
    stale = not holders and (not _may_be_held_unseen(path) or _quiet_s(path.parent) >= _SHARED_QUIET_S)
    return JitLock(
        op=path.parent.name,
        path=path,
        holders=holders,
        age_s=max(0.0, time.time() - status.st_mtime),
        stale=stale,
        identity=_identity(status),
    )


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _is_still_stale(lock: JitLock) -> bool:
    now = _look_at(lock.path)
    return now is not None and now.stale and now.identity == lock.identity


def _remove(lock: JitLock) -> bool:
    """Remove the lock unless another file took its place.

    Whoever removes a lock holds a ``flock`` on it. So between the check and the removal nobody else can remove the
    checked file, and nobody can create another one.
    """
    try:
        fd = os.open(lock.path, os.O_RDONLY)
    except OSError:
        return False
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # another process is removing it
        except OSError:
            pass  # a filesystem without flock
        if not _identity(os.fstat(fd)) == _identity(os.lstat(lock.path)) == lock.identity:
            return False
        os.unlink(lock.path)
        return True
    except OSError:
        return False  # gone by itself, or not ours to remove
    finally:
        os.close(fd)


def _holds(pid: int, path: Path, status: os.stat_result) -> bool:
    try:
        return _has_open(pid, status) or _is_ninja_in(path.parent, psutil.Process(pid))
    except (PermissionError, psutil.AccessDenied):
        return _could_hold(pid, status)
    except (OSError, psutil.NoSuchProcess):
        return False  # it has just ended


def _is_ninja_in(folder: Path, process: psutil.Process) -> bool:
    return process.name().startswith("ninja") and process.cwd() == os.path.realpath(folder)


def _has_open(pid: int, status: os.stat_result) -> bool:
    folder = f"/proc/{pid}/fd"
    for fd in os.listdir(folder):
        with suppress(FileNotFoundError):  # it was just closed
            # The name is compared first: a stat of any open file may block on a dead network mount.
            if os.readlink(f"{folder}/{fd}").endswith("/lock"):
                if os.path.samestat(os.stat(f"{folder}/{fd}"), status):
                    return True
    return False


def _could_hold(pid: int, status: os.stat_result) -> bool:
    """Whether a process whose files we may not see could have the lock open."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE or status.st_uid not in process.uids():
            return False
        # Every login has processes that may not be inspected, such as sshd's; but a builder runs Python.
        words = (process.name(), *process.cmdline()[:1])
        return any("python" in word or word.startswith("pt_main") for word in words)
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False


def _may_be_held_unseen(path: Path) -> bool:
    """Whether a holder may be out of sight: on another host, or on a system that does not list open files."""
    if not os.path.isdir("/proc/self/fd"):
        return True
    folder = os.path.realpath(path.parent)
    mounts = [part for part in psutil.disk_partitions(all=True) if _is_below(folder, part.mountpoint)]
    return not mounts or max(mounts, key=lambda part: len(part.mountpoint)).fstype not in _LOCAL_FILESYSTEMS


def _is_below(folder: str, mountpoint: str) -> bool:
    return os.path.commonpath([folder, mountpoint]) == mountpoint


def _quiet_s(folder: Path) -> float:
    """Seconds since anything in ``folder`` changed."""
    try:
        changed = [folder.stat().st_mtime, *(path.lstat().st_mtime for path in folder.iterdir())]
    except OSError:
        return 0.0  # something was just removed
    return time.time() - max(changed)
