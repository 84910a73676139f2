"""Races in a log of the simulated device: accesses to the same bytes that no wait orders.

Kernels run at once, on the host, so a race never shows in the numbers. It shows in the happens-before order, which
vector clocks keep for streams and host (``testing/streams/clocks.py``), and shadow memory for every block
(``testing/streams/shadow.py``).

The two tools differ in what they see. The stream sanitizer models streams on CPU tensors: it needs no compiler, its
waits can be dropped one by one while the program runs, and it draws timelines. The simulated device sees what torch
itself does for CUDA: the streams of autograd's threads, allocations and frees, pinned memory, copies to and from the
host.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from typing import NamedTuple

from lightning_zeroplus.testing.simulated_cuda.entry import Entry
from lightning_zeroplus.testing.streams.clocks import Clock, Device, Kernel, Stream, join
from lightning_zeroplus.testing.streams.locations import Location
from lightning_zeroplus.testing.streams.report import Race, Site
from lightning_zeroplus.testing.streams.shadow import Conflict, FreedMemory, Shadow, Span

_NOWHERE = Location("?", 0, "?")
_PINNED = -1


class _Block(NamedTuple):
    start: int
    end: int
    shadow: Shadow


def find_races(entries: Iterable[Entry]) -> list[Race]:
    """The races of a log; those of one kind and buffer between the same two places count as one."""
    order = _Order()
    for entry in entries:
        order.add(entry)
    return list(order.races.values())


class _Order:
    """Replays a log. What the host itself does is a stream of its own, for which every launch waits."""

    def __init__(self) -> None:
        self.races: dict[tuple[str, str, Site, Site], Race] = {}
        self._device = Device()
        self._streams: dict[tuple[int, int], Stream] = {}
        self._host = Stream(self._device, "the host")
        self._events: dict[int, Clock] = {}
        self._starts: list[int] = []
        self._blocks: dict[int, _Block] = {}
        self._freed = FreedMemory()
        self._handlers: dict[str, Callable[[Entry], None]] = {
            "kernel": self._run,
            "collective": self._run,
            "host": self._run_on_host,
            "record_event": self._record_event,
            "wait_event": self._wait_event,
            "allocate": self._allocate,
            "free": self._free,
            "record_stream": self._record_stream,
            "sync_stream": self._sync_stream,
            "query_stream": self._sync_stream,
            "sync_event": self._sync_event,
            "query_event": self._sync_event,
            "sync_device": self._sync_device,
            "may_wait": lambda entry: None,
        }

    def add(self, entry: Entry) -> None:
        self._handlers[entry.kind](entry)

    def _stream(self, entry: Entry) -> Stream:
        key = (entry.device, entry.stream)
        if key not in self._streams:
            name = f"stream {entry.stream}" if entry.stream else "the default stream"
            self._streams[key] = Stream(self._device, f"{name} of cuda:{entry.device}")
        return self._streams[key]

    def _run(self, entry: Entry) -> None:
        self._access(entry, self._stream(entry))

    def _run_on_host(self, entry: Entry) -> None:
        self._access(entry, self._host)
        join(self._device.host, self._host.clock)

    def _access(self, entry: Entry, stream: Stream) -> None:
        size = sum(end - start for start, end in (*entry.reads, *entry.writes))
        kernel = self._device.launch(entry.name, entry.location or _NOWHERE, size, stream)
        for write, spans in ((False, entry.reads), (True, entry.writes)):
            for start, end in spans:
                self._touch(start, end, kernel, write)

    def _touch(self, start: int, end: int, kernel: Kernel, write: bool) -> None:
        block = self._block(start)
        assert block is not None, f"{kernel.name} uses memory that was never allocated"
        for conflict in block.shadow.access(Span(start - block.start, end - block.start), kernel, write):
            self._found(block.shadow, conflict)

    def _found(self, shadow: Shadow, conflict: Conflict) -> None:
        first, second = Site.of(conflict.first), Site.of(conflict.second)
        key = (conflict.kind, shadow.allocated_by, first, second)
        known = self.races.get(key) or Race(conflict.kind, shadow.allocated_by, conflict.span, first, second, times=0)
        self.races[key] = known._replace(times=known.times + 1)

    def _block(self, address: int) -> _Block | None:
        index = bisect.bisect_right(self._starts, address) - 1
        block = self._blocks[self._starts[index]] if index >= 0 else None
        return block if block is not None and address < block.end else None

    def _allocate(self, entry: Entry) -> None:
        ((start, end),) = entry.writes
        size = end - start
        if entry.device == _PINNED:
            # The allocator of pinned memory waits for the copies that use it: its lifetime is nobody's worry.
            shadow = Shadow(size, None, f"{size} bytes of pinned memory{_at(entry)}")
        else:
            stream = self._stream(entry)
            made_before = entry.name.endswith("before the log")
            origin = "allocated before the log" if made_before else f"allocated{_at(entry)}"
            shadow = Shadow(size, stream, f"{size} bytes {origin}", self._freed.previous(stream, size))
        bisect.insort(self._starts, start)
        self._blocks[start] = _Block(start, end, shadow)

    def _free(self, entry: Entry) -> None:
        ((start, _),) = entry.writes
        block = self._blocks.pop(start)
        self._starts.pop(bisect.bisect_left(self._starts, start))
        if block.shadow.allocated_on is not None:
            self._freed.add(block.shadow)

    def _record_stream(self, entry: Entry) -> None:
        for start, _ in (*entry.reads, *entry.writes):
            block = self._block(start)
            if block is not None:
                block.shadow.recorded.add(self._stream(entry))

    def _record_event(self, entry: Entry) -> None:
        clock = dict(self._stream(entry).clock)
        join(clock, self._device.host)
        self._events[entry.event] = clock

    def _wait_event(self, entry: Entry) -> None:
        self._stream(entry).join(self._events.get(entry.event, {}))  # {}: recorded before the log

    def _sync_stream(self, entry: Entry) -> None:
        join(self._device.host, self._stream(entry).clock)

    def _sync_event(self, entry: Entry) -> None:
        join(self._device.host, self._events.get(entry.event, {}))

    def _sync_device(self, entry: Entry) -> None:
        for (device, _), stream in self._streams.items():
            if device == entry.device:
                join(self._device.host, stream.clock)


def _at(entry: Entry) -> str:
    return "" if entry.location is None else f" at {entry.location}"
