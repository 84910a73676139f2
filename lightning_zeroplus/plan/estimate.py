"""What a strategy costs one rank: bytes by moment and purpose, and the collectives of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]

#: What memory is used for, in the order of the table. "working" is freed within the moment: copies for a collective, a
#: layer's gradient before it is added, what the optimizer computes with.
PURPOSES = ("weights", "gradients", "states", "buckets", "window", "working")


class Collective(NamedTuple):
    """Collectives of one kind in one optimizer step.

    Attributes:
        kind: What they do.
        of: ``"gradients"`` or ``"weights"``.
        number: How many there are.
        payload: Bytes of all their whole tensors, with padding: the input of a reduce-scatter, the output of an
            all-gather.
        overlaps: Whether forwards or backwards go on meanwhile.
    """

    kind: Kind
    of: Literal["gradients", "weights"]
    number: int
    payload: int
    overlaps: bool

    def sent(self, ranks: int) -> float:
        """Bytes that one rank sends, in a ring."""
        return self.payload * (ranks - 1) / ranks * (2 if self.kind == "all_reduce" else 1)


class Link(NamedTuple):
    """The alpha-beta model of a network.

    Attributes:
        bytes_per_second: What one rank can send.
        latency: Seconds that a collective takes if it sends nothing.
    """

    bytes_per_second: float
    latency: float

    def seconds(self, collective: Collective, ranks: int) -> float:
        """The time on the wire."""
        if ranks == 1:
            return 0.0
        return collective.number * self.latency + collective.sent(ranks) / self.bytes_per_second


@dataclass(frozen=True)
class Estimate:
    """What a strategy costs one rank: the rank with the most.

    Attributes:
        strategy: The name with which it is registered.
        window: Whether all backwards of a step share one reduction at stages 2 and 3 and under FSDP2.
        ranks: Their number.
        moments: Bytes on the device, by moment of a step and by purpose (:data:`PURPOSES`).
        between: Bytes on the device between two steps.
        host: Bytes in host memory, for what is offloaded.
        collectives: Of one optimizer step.
        notes: What the numbers leave out or take for granted.
    """

    strategy: str
    window: bool
    ranks: int
    moments: Mapping[str, Mapping[str, int]]
    between: int
    host: int
    collectives: tuple[Collective, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def moment(self) -> str:
        """The moment with the most bytes."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak(self) -> int:
        """The most bytes at a time, without activations."""
        return sum(self.moments[self.moment].values())

    @property
    def reduced(self) -> int:
        """Payload of the gradient reductions of a step, as ``ReductionMonitor`` counts it."""
        return sum(each.payload for each in self.collectives if each.of == "gradients")

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a step."""
        return sum(each.sent(self.ranks) for each in self.collectives)

    def seconds(self, link: Link) -> float:
        """Time on the wire in a step."""
        return sum(link.seconds(each, self.ranks) for each in self.collectives)

    def exposed(self, link: Link) -> float:
        """The part of :meth:`seconds` that no forward or backward can hide."""
        return sum(link.seconds(each, self.ranks) for each in self.collectives if not each.overlaps)
