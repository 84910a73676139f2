"""What the simulated device did: a record of kernels, collectives, waits and memory, and its summaries."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning_zeroplus.testing.simulated_cuda.entry import Entry
from lightning_zeroplus.testing.simulated_cuda.library import SimulatedCudaError, loaded
from lightning_zeroplus.testing.simulated_cuda.order import find_races
from lightning_zeroplus.testing.streams.clocks import running_node
from lightning_zeroplus.testing.streams.locations import Location, calling_location
from lightning_zeroplus.testing.streams.report import Race, StreamRaceError, report

_SYNCHRONIZATIONS = frozenset({"sync_stream", "sync_event", "sync_device", "may_wait"})


class Synchronization(NamedTuple):
    """A place where the host waits for the device.

    Attributes:
        operation: The operator or CUDA's function.
        location: ``file:line function``; empty if locations were not asked for.
    """

    operation: str
    location: str


class Log:
    """What :func:`record` has recorded.

    Attributes:
        entries: Everything, in the order of the program. Empty until the ``with`` block ends.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def kernels(self) -> Counter[str]:
        """How often each kernel was launched, collectives not counted."""
        return Counter(entry.name for entry in self.entries if entry.kind == "kernel")

    def collectives(self) -> Counter[str]:
        """How often each collective was launched."""
        return Counter(entry.name for entry in self.entries if entry.kind == "collective")

    def host_synchronizations(self) -> Counter[Synchronization]:
        """How often the host waited for the device, by place."""
        return Counter(
            Synchronization(entry.name, "" if entry.location is None else str(entry.location))
            for entry in self.entries
            if entry.kind in _SYNCHRONIZATIONS
        )

    def events(self) -> int:
        """How often an event was recorded, those of collectives included."""
        return sum(entry.kind == "record_event" for entry in self.entries)

    def peak_bytes(self, device: int) -> int:
        """The most bytes that were allocated on a device at one time, with those from before the log."""
        now = most = 0
        for entry in self.entries:
            if entry.device == device and entry.kind in ("allocate", "free"):
                size = sum(end - start for start, end in entry.writes)
                now += size if entry.kind == "allocate" else -size
                most = max(most, now)
        return most

    def races(self, ignore: Callable[[Entry], bool] | None = None) -> list[Race]:
        """The accesses to the same bytes that nothing orders.

        Args:
            ignore: Entries that shall have no effect. It shows which waits matter: without them, there are races.
        """
        kept = self.entries if ignore is None else [entry for entry in self.entries if not ignore(entry)]
        return find_races(kept)

    def check(self) -> None:
        """Raise if there are races.

        Raises:
            StreamRaceError: With a report.
        """
        races = self.races()
        if races:
            raise StreamRaceError(report(races, sum(entry.kind in ("kernel", "collective") for entry in self.entries)))


class _Places:
    """Numbers for the places that the extension module asks for: (location, autograd node)."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Location, str], int] = defaultdict(lambda: len(self._numbers))

    def current(self) -> int:
        node = running_node()
        return self._numbers[calling_location(), "" if node is None else node.name()]

    def all(self) -> list[tuple[Location, str]]:
        return list(self._numbers)


@contextmanager
def record(locations: bool = False) -> Iterator[Log]:
    """Log what the simulated devices of this process do within.

    Args:
        locations: Also find the line of the program that asked for each entry. It takes ten times as long.

    Yields:
        The log; its entries are there when the block ends.

    Raises:
        SimulatedCudaError: If this process has no simulated device, or another log is open.

    Example::

        with record(locations=True) as log:
            training_step()
        log.check()
        assert not log.host_synchronizations()
    """
    global _open
    native = loaded()
    if native is None:
        raise SimulatedCudaError(
            "This process has no simulated CUDA device. Start it with"
            ' `python -m lightning_zeroplus.testing.simulated_cuda`, or use `RankPool(2, device="simulated_cuda")`.'
        )
    if _open:
        raise SimulatedCudaError("A log of the simulated CUDA device is open already: logs cannot be nested.")
    log, places = Log(), _Places()
    _open = True
    native.start(places.current if locations else None)
    try:
        yield log
    finally:
        _open = False
        log.entries = _entries(native.stop(), places.all())


_open = False


def _entries(rows: list[tuple[Any, ...]], places: list[tuple[Location, str]]) -> list[Entry]:
    entries = []
    for kind, name, device, stream, event, reads, writes, place in rows:
        location, node = places[place] if place >= 0 else (None, "")
        label = f"{name} in {node}" if node else name
        entries.append(Entry(kind, label, device, stream, event, reads, writes, location))
    return entries
