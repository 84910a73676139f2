"""Collectives on a communication stream of their process group, with work handles that streams wait for.

As with NCCL: a collective runs on the group's own stream, after all earlier work of the calling stream.
``work.wait()`` makes the current stream wait, not the host. torch waits at once for a collective that is not async.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from lightning_zeroplus.testing.streams.clocks import Clock, Device, Stream, join

_TORCH = f"{Path(torch.__file__).parent}/"
#: The methods of a process group that return a work handle.
_METHODS = (
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_to_all_single",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
    "_end_coalescing",
)


class Communication:
    """The communication streams of a simulated device.

    Args:
        device: The simulated device.

    Attributes:
        waiting: True within a wait. Operators that run there are Gloo's, whose reduce-scatter copies its result in the
            wait. They are ignored, because NCCL launches nothing there.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams: dict[Any, Stream] = {}
        self._started: WeakKeyDictionary[Any, tuple[Clock, bool]] = WeakKeyDictionary()
        self._group: Any = None
        self.waiting = False

    def stream(self) -> Stream:
        """The stream of the process group whose method runs. All functional collectives share one other stream."""
        group = self._group if self._group is not None else "functional"
        if group not in self._streams:
            index = len(self._streams)
            name = "communication" if not index else f"communication {index}"
            self._streams[group] = Stream(self._device, name)
        return self._streams[group]

    def begin(self) -> Stream:
        """Let the communication stream wait for the current stream, and return it for the collective that starts."""
        stream = self.stream()
        stream.join(self._device.current.clock)
        return stream

    def finish_functional(self) -> None:
        """``wait_tensor``: let the current stream wait for the functional collectives."""
        self._device.current.join(self.stream().clock)

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """The attributes to replace while the simulation runs: owner, name, and replacement."""
        for name in _METHODS:
            if hasattr(dist.ProcessGroup, name):
                yield dist.ProcessGroup, name, self._starting(name, getattr(dist.ProcessGroup, name))
        for name in ("wait", "synchronize", "block_current_stream"):
            if hasattr(Work, name):
                yield Work, name, self._waiting(name, getattr(Work, name))

    def _starting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(group: Any, *args: Any, **kwargs: Any) -> Any:
            outer, self._group = self._group, group.group_name
            try:
                work = original(group, *args, **kwargs)
                if isinstance(work, Work):
                    self._started[work] = (dict(self.stream().clock), name == "barrier")
                return work
            finally:
                self._group = outer

        return start

    def _waiting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            self.waiting = True
            try:
                result = original(work, *args, **kwargs)
            finally:
                self.waiting = False
            clock, blocks_host = self._started.get(work, ({}, False))
            # torch's own wait for a collective that is not async: no code under test can forget it
            by_torch = sys._getframe(1).f_code.co_filename.startswith(_TORCH)
            if by_torch or self._device.happens(f"work.{name}"):
                self._device.current.join(clock)
                if blocks_host:
                    join(self._device.host, clock)
            return result

        return wait
