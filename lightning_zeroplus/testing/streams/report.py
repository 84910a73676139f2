"""What a sanitizer has found, for people and for assertions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_zeroplus.testing.streams.clocks import Kernel
from lightning_zeroplus.testing.streams.shadow import Span


class StreamRaceError(AssertionError):
    """Something was accessed from several streams without the waiting that would order it."""


class Site(NamedTuple):
    """One access.

    Attributes:
        operation: The operator, and the autograd node that called it.
        stream: The name of its stream.
        location: ``file:line function`` of the nearest Python frame outside torch.
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
    """Two accesses to the same bytes that nothing orders. Races between the same two lines are one.

    Attributes:
        kind: ``"write-write"``, ``"write-read"``, ``"read-write"``: the order in the program; or
            ``"use-after-free"``: the second access may be to memory that the first still uses.
        buffer: The name of the memory.
        span: The bytes of the first time, from the beginning of the buffer's storage.
        first: The access that the program launches first.
        second: The other one.
        times: How often it was found.
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
    """One paragraph per race."""
    head = f"{len(races)} races in {kernels} kernels" if len(races) != 1 else f"1 race in {kernels} kernels"
    return "\n".join([head, *(f"  {race}" for race in races)])
