"""Run a script in a process that has already imported everything, with ranks that are forked from it.

Importing torch, Lightning and DeepSpeed takes most of the time of a short job. Here a fork server has imported them:
the script is forked from it, and Lightning's launcher forks the other ranks from the script instead of starting Python
again. From there on all is as in a job that was started by hand, whose start ``tests/strategy/test_launch.py`` covers:
real processes with their parents, signals, atexit handlers and exit statuses.
"""

from __future__ import annotations

import atexit
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.support.forkserver import fork_server

# What a launcher leaves in the environment would make a script believe that it has been launched.
_LAUNCHER_VARIABLES = (
    "LOCAL_RANK", "RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
)  # fmt: skip


def run(
    script: Callable[[], None] | Path, *arguments: str, timeout: float = 300, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` to its end, as ``subprocess.run`` would.

    Args:
        script: A function of a module, or the path of a file, which runs as ``__main__``.
        *arguments: Its command line.
        timeout: Seconds until all of the job is killed.
        folder: Its current directory.

    Raises:
        subprocess.TimeoutExpired: After ``timeout`` seconds.
    """
    name = script.name if isinstance(script, Path) else script.__module__
    with TemporaryDirectory() as temporary:
        out, err = Path(temporary, "out"), Path(temporary, "err")
        main = start(script, list(arguments), out, err, folder)
        main.join(timeout)
        if main.exitcode is None:
            assert main.pid is not None
            os.killpg(main.pid, signal.SIGKILL)
            main.join()
            raise subprocess.TimeoutExpired(name, timeout, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(name, main.exitcode, out.read_text(), err.read_text())


def start(
    script: Callable[[], None] | Path, arguments: list[str], out: Path, err: Path, folder: Path | None = None
) -> ForkServerProcess:
    """Start ``script`` in a session of its own, with its output streams in files, which may be the same."""
    process = fork_server().Process(target=_run_in_session, args=(script, arguments, str(out), str(err), folder))
    process.start()
    return process


def wait_until_it_says(
    main: ForkServerProcess | subprocess.Popen[Any], pattern: str, output: Path, within: float = 120
) -> None:
    """Wait until a line of a job's output begins with ``pattern``, a regular expression, or the job has ended."""

    def runs() -> bool:
        return main.poll() is None if isinstance(main, subprocess.Popen) else main.is_alive()

    deadline = time.monotonic() + within
    while runs() and not re.search(f"^{pattern}", said := output.read_text(errors="replace"), re.MULTILINE):
        assert time.monotonic() < deadline, f"no {pattern!r} within {within} s\n{said}"
        time.sleep(0.02)


def _run_in_session(
    script: Callable[[], None] | Path, arguments: list[str], out: str, err: str, folder: Path | None
) -> None:
    os.setsid()
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    for name in _LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    if folder is not None:
        os.chdir(folder)
    if isinstance(script, Path):
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.parent))
        function: Callable[[], Any] = partial(runpy.run_path, str(script), run_name="__main__")
    else:
        sys.argv = [script.__module__, *arguments]
        function = script
    launcher = "strategies.launchers.subprocess_script.subprocess"

    def fork(command: list[str], env: dict[str, str], cwd: str | None) -> _Forked:
        return _Forked(function, env)

    forking = SimpleNamespace(Popen=fork)
    with patch(f"lightning.pytorch.{launcher}", forking), patch(f"lightning.fabric.{launcher}", forking):
        _run(function)


def _run(function: Callable[[], Any]) -> None:
    """Run as the main module runs, to the end of the process."""
    status: Any = 0
    try:
        function()
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

    def __init__(self, function: Callable[[], Any], env: dict[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.clear()
            os.environ.update(env)
            _run(function)

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
