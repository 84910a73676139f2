"""Saves that go on while the training does: one at a time, in a thread and a process group of their own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_zeroplus.checkpoint.everywhere import everywhere

log = logging.getLogger(__name__)
T = TypeVar("T")


class BackgroundSaves:
    """Writes what was copied to host memory.

    The collectives of a save run in the thread. They must not meet those of the training, which runs them in another
    order on another thread, and so have a group of their own, on gloo.

    Args:
        timeout: Time limit of its collectives.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._timeout = timeout
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_writing = False
        self._afterwards: list[Callable[[], None]] = []

    def start(self, write: Callable[[Any], None]) -> None:
        """Call ``write`` in the thread, with the group as its argument; all ranks call this, after :meth:`wait`."""
        assert self._thread is None
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        self._is_writing = True
        # Not a daemon: a process that ends, with or without an error, first completes what it has begun.
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def _run(self, write: Callable[[Any], None]) -> None:
        try:
            write(self._group)
        except BaseException as error:
            log.error(f"A checkpoint could not be saved in the background: {error}")
            self._error = error
        with self._lock:
            self._is_writing = False
            actions, self._afterwards = self._afterwards, []
            try:
                for action in actions if self._error is None else ():
                    action()
            except BaseException as error:
                self._error = error

    def afterwards(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the save that is being written is complete, or now; never if it has failed."""
        with self._lock:
            if self._is_writing:
                self._afterwards.append(action)
            elif self._error is None:
                action()

    def join(self) -> None:
        """Wait for this rank's thread."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Wait until the save that was started is complete on all ranks; all ranks must call this.

        Raises:
            Exception: On all ranks, if it has failed on one.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        everywhere(lambda: _raise(error))

    def close(self) -> None:
        """Destroy the group. The next save makes another."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


def _raise(error: BaseException | None) -> None:
    if isinstance(error, Exception):
        raise error
    if error is not None:
        raise RuntimeError(f"A checkpoint could not be saved: {error!r}") from error


def on_host(state: T) -> T:
    """A copy in host memory of a tree of containers and tensors; a DTensor stays one."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        copied: T = tree_map_only(Tensor, _copy, state)
    return copied


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().to("cpu")
