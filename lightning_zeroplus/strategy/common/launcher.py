"""The launcher of the strategies: the ranks of a node start together and end together."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import lightning.pytorch as pl
import psutil
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_zeroplus.strategy.common.process import name_time_limit

log = logging.getLogger(__name__)

_POLL_S = 0.2
# How long the other ranks may take to end by themselves after one has failed. Their collectives with it fail at once.
_GRACE_S = 5.0
# The process that launched this rank. Ranks of torchrun or SLURM lack it, and are left to their launchers.
_LAUNCHER = "ZEROPLUS_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class ZeroPlusLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which also ends all ranks of the node when one rank fails, and logs the cause.

    Lightning checks every 5 seconds whether a rank that it has started has failed. Then it silently kills the launching
    process, which is a rank too: the job's exit status is the status of SIGKILL. If the launching rank fails, only a
    failing collective ends the other ranks, and a stopped rank stays for ever. Here:

    - A rank that ends with an error ends the others within seconds. Its exit status is the job's: 128 + n after
      signal n. A killed or stopped rank is logged before the errors that follow from it.
    - The launching process waits for the other ranks, and kills them after its own failure.
    - If the launching process is killed, or if the job fails while it is stopped, the other ranks end with it (Linux).
    """

    ranks: ClassVar[LaunchedRanks | None] = None

    @override
    def _call_children_scripts(self) -> None:
        if threading.current_thread() is threading.main_thread():  # PDEATHSIG follows the launching *thread*
            os.environ[_LAUNCHER] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            os.environ.pop(_LAUNCHER, None)
        # Empty: the caller hands `procs` to Lightning's own observer.
        ZeroPlusLauncher.ranks, self.procs = LaunchedRanks(self.procs), []
        ZeroPlusLauncher.ranks.start()

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        launched_by = _end_with_launcher()
        try:
            result = super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException as error:
            if trainer is not None:
                name_time_limit(error, getattr(trainer.strategy, "_timeout", None))
            if isinstance(error, SIGTERMException):
                raise  # the other ranks end in the same way, and are given the time to
            if self.ranks is not None:
                self.ranks.failed_here()
            elif launched_by is not None:
                _end_stopped(launched_by)
            raise
        if self.ranks is not None:
            self.ranks.raised = False
        return result

    @override
    def kill(self, signum: Any) -> None:
        for process in [] if self.ranks is None else self.ranks.processes:
            process.send_signal(signum)


class LaunchedRanks(threading.Thread):
    """Watches the ranks that this process has launched, until this process ends.

    Args:
        processes: The processes of the ranks from local rank 1 on.

    Attributes:
        raised: Whether this process's own rank has raised, and so ends by itself.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[Any]]) -> None:
        super().__init__(daemon=True, name="launched-ranks")
        self.processes = list(processes)
        self.raised = False
        self._leaving = threading.Event()
        self._reported: set[int] = set()
        # Runs after the handler that destroys the process group, which is registered later: by then the collectives of
        # the other ranks fail.
        atexit.register(self._at_exit)

    def _first_failure(self) -> int | None:
        """The exit status of a failed rank, in a shell's form; None if no rank has failed."""
        codes = [process.poll() for process in self.processes]
        return next((code if code > 0 else 128 - code for code in codes if code), None)

    @override
    def run(self) -> None:
        while not self._leaving.wait(_POLL_S):
            status = self._first_failure()
            if status is None:
                continue
            self._leaving.wait(2 * _POLL_S)  # if this rank raises now, failed_here() reports
            if not self.raised:
                self.report(stopped=False)
            if self._leaving.wait(_GRACE_S) or self.raised:
                return
            self._end(status)

    def failed_here(self) -> None:
        """This process's rank has raised: first report other failures, which may be the cause."""
        deadline = time.monotonic() + 0.5  # the connections of a killed process close before poll() sees its end
        error = sys.exc_info()[1]
        if isinstance(error, KeyboardInterrupt):  # Ctrl-C reaches all ranks, and may have ended others first
            self._reported.update(rank for rank, process in enumerate(self.processes, 1) if (process.poll() or 0) > 0)
        may_follow = isinstance(error, RuntimeError)  # as a collective's error does
        while may_follow and self._first_failure() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S / 4)
        self.report(stopped=True)
        self.raised = True

    def report(self, stopped: bool) -> None:
        """Log the ranks that have failed and, if ``stopped``, the ranks that are stopped; each once."""
        for rank, process in enumerate(self.processes, 1):
            who = f"Local rank {rank} (process {process.pid})"
            code = process.poll()
            if rank in self._reported or code == 0:
                continue
            if code is not None and code < 0:
                log.error(f"{who} was killed by {_signal_name(-code)}{_HINTS.get(-code, '')}.")
            elif code is not None:
                log.error(f"{who} ended with exit status {code}: what it printed is above.")
            elif stopped and _is_stopped(process.pid):
                log.error(f"{who} is stopped by a signal (SIGSTOP, SIGTSTP), and the other ranks did not wait longer.")
            else:
                continue
            self._reported.add(rank)

    def _at_exit(self) -> None:
        """Wait for the other ranks, so that the launching process ends last. After a failure kill them."""
        self._leaving.set()
        failed = self.raised or hasattr(sys, "last_value")
        deadline = time.monotonic() + _GRACE_S if failed else None
        while any(process.poll() is None and not (failed and _is_stopped(process.pid)) for process in self.processes):
            if deadline is None and self._first_failure() is not None:
                deadline = time.monotonic() + _GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(_POLL_S / 4)
        status = self._first_failure()
        if status is not None and not failed:
            self.report(stopped=True)
            self._end(status)
        self._kill()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()  # SIGTERM may not reach a rank that hangs in a collective or is stopped
        for process in self.processes:
            process.wait()

    def _end(self, status: int) -> None:
        self._kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the main thread may hang in a collective


_HINTS: dict[int, str] = {signal.SIGKILL: " (by the kernel, if the machine ran out of memory: see `dmesg`)"}


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _end_with_launcher() -> int | None:
    """Let the kernel kill this rank when its launcher ends. A launcher that ends normally waits for its ranks first.

    Returns:
        The launcher's process id; None if :class:`ZeroPlusLauncher` did not launch this rank.
    """
    launcher = os.getppid()
    if os.environ.get(_LAUNCHER) != str(launcher):
        return None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)  # the launcher ended before prctl()
    return launcher


def _end_stopped(launcher: int) -> None:
    """This rank has failed: kill the launcher if it is stopped, which ends all its ranks."""
    if not _is_stopped(launcher):
        return
    traceback.print_exc()
    log.error(f"Local rank 0 (process {launcher}) is stopped by a signal, and is killed: this job has failed.")
    os.kill(launcher, signal.SIGKILL)
