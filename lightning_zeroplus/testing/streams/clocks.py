"""Simulated streams and events: the happens-before order, as vector clocks.

Every kernel gets a number on its stream. A stream's clock holds, for each stream, the last kernel that is finished
before the next kernel of this stream starts. The host's clock holds the same for the next Python statement. Waiting
joins clocks. If neither of two kernels is in the other's clock, they may run in any order, whatever order they were
launched in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from lightning_zeroplus.testing.streams.locations import Location, calling_location

Clock = dict[int, int]

#: How often a host asks whether something is over until it is told so.
PATIENCE = 1000

# Returns the autograd node that this thread evaluates, also within tensor hooks and post-accumulate-grad hooks.
running_node = torch._C._current_autograd_node


def join(clock: Clock, other: Clock) -> None:
    """Raise each entry of ``clock`` to at least its value in ``other``, in place."""
    for stream, number in other.items():
        if number > clock.get(stream, 0):
            clock[stream] = number


class Kernel(NamedTuple):
    """One operation on a stream.

    Attributes:
        name: The operator, and the autograd node that called it.
        stream: Where it runs.
        number: Number of the kernel on its stream, from 1.
        after: For each stream, the last kernel that is finished before this one starts.
        nbytes: The bytes that it reads and writes.
        location: See :func:`~.locations.calling_frame`.
    """

    name: str
    stream: Stream
    number: int
    after: Clock
    nbytes: int
    location: Location

    def is_after(self, other: Kernel) -> bool:
        """Whether ``other`` is finished before this kernel starts."""
        return self.after.get(other.stream.index, 0) >= other.number


class Device:
    """The streams of one simulated accelerator, and the host that feeds them.

    Args:
        drop: The site of a synchronization that shall have no effect.

    Attributes:
        streams: All streams; the first is the default stream.
        host: The host's clock: for each stream, the last kernel that the host has waited for.
        kernels: Everything launched, in the order of the program.
        sites: How often each synchronization call was reached.
    """

    def __init__(self, drop: str | None = None) -> None:
        self.drop = drop
        self.streams: list[Stream] = []
        self.host: Clock = {}
        self.kernels: list[Kernel] = []
        self.sites: Counter[str] = Counter()
        self.default = Stream(self, name="default")
        self._entered: list[tuple[Stream, Any]] = [(self.default, None)]

    @property
    def current(self) -> Stream:
        """The stream of the running autograd node, unless code within the node has entered another."""
        stream, owner = self._entered[-1]
        node = running_node()
        if node is None or owner is node:
            return stream
        return self.stream_of(node) or stream

    def stream_of(self, node: Any) -> Stream | None:
        """The stream that was current when the autograd node was made; None if this device did not see it."""
        stream: Stream | None = node.metadata.get(self) or getattr(node, "simulated_stream", None)
        return stream if stream is not None and stream.device is self else None

    def is_tagged(self, node: Any) -> bool:
        return self in node.metadata

    def tag(self, node: Any, stream: Stream) -> None:
        """Let the node run on ``stream``."""
        node.metadata[self] = stream

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Make ``stream`` current within; None changes nothing, as in ``torch.cuda.stream``."""
        self._entered.append((stream or self.current, running_node()))
        try:
            yield
        finally:
            self._entered.pop()

    def launch(self, name: str, location: Location, nbytes: int = 0, stream: Stream | None = None) -> Kernel:
        """Add a kernel to a stream, the current one if none is given."""
        stream = stream or self.current
        join(stream.clock, self.host)  # launched by a host that has waited
        number = stream.clock.get(stream.index, 0) + 1
        kernel = Kernel(name, stream, number, dict(stream.clock), nbytes, location)
        stream.clock[stream.index] = number
        self.kernels.append(kernel)
        return kernel

    def synchronize(self) -> None:
        """Let the host wait for every stream."""
        if self.happens("device.synchronize"):
            for stream in self.streams:
                join(self.host, stream.clock)

    def tells_host(self, clock: Clock, asked: int) -> bool:
        """Whether what has this clock is over, for a host that asks for the ``asked``-th time; it knows then."""
        over = asked >= PATIENCE or all(self.host.get(stream, 0) >= time for stream, time in clock.items())
        if over:
            join(self.host, clock)
        return over

    def happens(self, what: str) -> bool:
        """Count a call of a synchronization; return whether it shall have an effect."""
        site = f"{what} at {calling_location()}"
        self.sites[site] += 1
        return site != self.drop


class Stream:
    """A simulated stream, with the methods of ``torch.cuda.Stream``.

    Args:
        device: The simulated device.
        name: For reports.
        **_: Arguments of accelerators' streams, such as ``priority``; ignored.
    """

    def __init__(self, device: Device, name: str | None = None, **_: Any) -> None:
        self.device = device
        self.index = len(device.streams)
        self.name = name or f"stream {self.index}"
        self.clock: Clock = dict(device.host)
        self._asked = 0
        device.streams.append(self)

    def __repr__(self) -> str:
        return self.name

    def wait_stream(self, stream: Stream) -> None:
        if self.device.happens("wait_stream"):
            self.join(stream.clock)

    def wait_event(self, event: Event) -> None:
        if self.device.happens("wait_event"):
            self.join(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        if self.device.happens("stream.synchronize"):
            join(self.device.host, self.clock)

    def query(self) -> bool:
        """As :meth:`Event.query`."""
        self._asked += 1
        over = self.device.tells_host(self.clock, self._asked)
        if over:
            self._asked = 0  # it gets more to do
        return over

    def join(self, clock: Clock) -> None:
        """Wait as torch itself does: not a synchronization of the code under test."""
        join(self.clock, clock)


class Event:
    """A simulated event, with the methods of ``torch.cuda.Event``. Waiting for an unrecorded event does nothing."""

    def __init__(self, device: Device, *_: Any, **__: Any) -> None:
        self.device = device
        self.clock: Clock = {}
        self._asked = 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.device.current
        self.clock = dict(stream.clock)
        join(self.clock, self.device.host)
        self._asked = 0

    def wait(self, stream: Stream | None = None) -> None:
        if self.device.happens("event.wait"):
            (stream or self.device.current).join(self.clock)

    def synchronize(self) -> None:
        if self.device.happens("event.synchronize"):
            join(self.device.host, self.clock)

    def query(self) -> bool:
        """Whether it is over: "not yet", unless the host has waited for it, as a busy device answers.

        A program must be right then, too. Who asks on and on is told in the end that it is over.
        """
        self._asked += 1
        return self.device.tells_host(self.clock, self._asked)

    def elapsed_time(self, end_event: Event) -> float:
        """Zero: only :meth:`.StreamSanitizer.timeline` gives simulated kernels a duration."""
        return 0.0
