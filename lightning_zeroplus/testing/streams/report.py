"""The races that a sanitizer has found, and their report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_zeroplus.testing.streams.clocks import Kernel
from lightning_zeroplus.testing.streams.shadow import Span


class StreamRaceError(AssertionError):
    """Memory was accessed from several streams without a wait that orders the accesses."""


class Site(NamedTuple):
    """One access.

    Attributes:
        operation: The operator, and the autograd node that called it.
        stream: The name of its stream.
        location: ``file:line function`` of :func:`~.locations.calling_frame`.
    """

    operation: str
    stream: str
    location: str

    @classmethod
    def of(cls, kernel: Kernel) -> Site:
        return cls(kernel.name, kernel.stream.name, str(kernel.location))

    def __str__(self) -> str:
        return f"{self.operation} on {self.stream} at {self.location}"


class Race(NamedTuple):
    """Two unordered accesses to the same bytes. Races of one kind and buffer between the same two sites count as one.

    Attributes:
        kind: ``"write-write"``, ``"write-read"`` or ``"read-write"``, in the order of the program; or
            ``"use-after-free"``: the second access may be to memory that the first still uses.
        buffer: The name of the memory.
        span: The bytes, at the first occurrence, from the beginning of the buffer's storage.
        first: The access that the program launches first.
        second: The other access.
        times: Number of occurrences.
    """

    kind: str
    buffer: str
    span: Span
    first: Site
    second: Site
    times: int

    def __str__(self) -> str:
        return (
            f"{self.kind} of {self.buffer}, bytes {self.span.start} to {self.span.end} ({self.times} times)\n"
            f"    first:  {self.first}\n"
            f"    second: {self.second}"
        )


def report(races: Sequence[Race], kernels: int) -> str:
    """The report: one paragraph per race."""
    head = f"{len(races)} races in {kernels} kernels" if len(races) != 1 else f"1 race in {kernels} kernels"
    return "\n".join([head, *(f"  {race}" for race in races)])
