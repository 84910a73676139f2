"""One entry of the log."""

from __future__ import annotations

from typing import Literal, NamedTuple

from lightning_zeroplus.testing.streams.locations import Location

Kind = Literal[
    "kernel",
    "collective",
    "host",
    "record_event",
    "wait_event",
    "allocate",
    "free",
    "record_stream",
    "sync_stream",
    "sync_event",
    "sync_device",
    "query_event",
    "query_stream",
    "may_wait",
]


class Entry(NamedTuple):
    """One thing that happened.

    Attributes:
        kind: ``kernel`` and ``collective`` run on a stream. ``host`` is a CPU operator on pinned memory. The host waits
            in ``sync_*``; in ``query_*`` it asks, and learns that the work is over. In ``may_wait`` it waits or not, so
            nothing is ordered.
        name: The operator, the collective, or CUDA's function; the autograd node that called it is added.
        device: The number of the device; -1 for pinned memory.
        stream: The number of the stream on its device; 0 is the default stream.
        event: The number of the event; 0 if there is none.
        reads: Addresses of the bytes read: pairs of the first, and the one after the last.
        writes: The same for bytes written, allocated or freed.
        location: The line of Python that asked for it; None if locations were not asked for.
    """

    kind: Kind
    name: str
    device: int
    stream: int
    event: int
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    location: Location | None
