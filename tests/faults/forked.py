"""Run a script in a process that has already imported everything, with ranks that are forked from it.

Importing torch, Lightning and DeepSpeed takes most of the time of a short job. Here a fork server has imported them:
the script is forked from it, and Lightning's launcher forks the other ranks from the script instead of starting Python
again. From there on all is as in a job that was started by hand, whose start ``tests/test_launch.py`` covers: real
processes with their parents, signals, atexit handlers and exit statuses.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.forkserver import fork_server


def start(script: Callable[[], None], arguments: list[str], output: Path) -> ForkServerProcess:
    """Start ``script`` in a session of its own, with both output streams in a file."""
    process = fork_server().Process(target=_run_in_session, args=(script, arguments, str(output)))
    process.start()
    return process


def _run_in_session(script: Callable[[], None], arguments: list[str], output: str) -> None:
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    sys.argv = [script.__module__, *arguments]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    launchers = "lightning.pytorch.strategies.launchers.subprocess_script.subprocess"

    def fork(command: list[str], env: dict[str, str], cwd: str | None) -> _Forked:
        return _Forked(script, env)

    with patch(launchers, SimpleNamespace(Popen=fork)):
        _run(script)


def _run(script: Callable[[], None]) -> None:
    """Run as the main module runs, to the end of the process."""
    status: Any = 0
    try:
        script()
    except SystemExit as error:
        status = error.code
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status if isinstance(status, int) else status is not None)


class _Forked:
    """What Lightning's launcher needs of ``subprocess.Popen``, for a fork."""

    def __init__(self, script: Callable[[], None], env: dict[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.clear()
            os.environ.update(env)
            _run(script)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
