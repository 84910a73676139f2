"""Processes that have the simulated device, for a rank pool."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe, spawn
from pathlib import Path
from typing import Any

from lightning_zeroplus.internals.extensions import choose_extensions_folder
from lightning_zeroplus.testing.simulated_cuda import library

BOOT = Path(__file__).with_name("boot.py")


def environment() -> dict[str, str]:
    """This process's variables for a process with the simulated device: DeepSpeed must pick CUDA there."""
    return {**os.environ, "DS_ACCELERATOR": "cuda"}


class SimulatedProcess:
    """A process that calls ``serve(*arguments, pipe)``, with the members of ``multiprocessing.Process`` that pools use.

    ``multiprocessing`` itself imports the parent's main module, and so torch, before anything of ours can run.

    Args:
        devices: The number of devices that it has.
        serve: A picklable function.
        arguments: Its arguments, without the pipe.

    Attributes:
        pipe: This side of the connection.
        sentinel: A file descriptor that is readable once the process is gone.

    Raises:
        SimulatedCudaError: If there can be no simulated device here.
    """

    def __init__(self, devices: int, serve: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        choose_extensions_folder()
        library.build()
        self.pipe, theirs = Pipe()
        self.sentinel, alive = os.pipe()
        command = [sys.executable, str(BOOT), "rank", str(devices), str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=environment(), pass_fds=(theirs.fileno(), alive))
        os.close(alive)
        theirs.close()
        atexit.register(self.kill)
        preparation = spawn.get_preparation_data(f"{type(self).__name__}-{self.pid}")
        preparation.pop("authkey", None)  # for connections that this process does not make
        self.pipe.send(preparation)
        self.pipe.send((serve, arguments))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        """As of ``multiprocessing``: negative for a signal, None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most ``timeout`` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return
        atexit.unregister(self.kill)
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1
