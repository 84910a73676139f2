"""Faster collectives for tensors on the CPU, made of gloo's own.

Gloo's reduce-scatter all-reduces and throws most of the result away, and its all-gather sends everything around a ring
in one piece. Here a reduce-scatter is an all-to-all and a sum, which moves half the bytes of an all-reduce, and an
all-gather is one broadcast per rank, all at once, from and to the place where the result belongs. The parts of the
ranks may have any lengths, so that nothing needs padding.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_PATIENCE_S = 1.0
#: What is received at once is kept in memory of this size: fresh memory costs as much time as the collective.
_KEPT_BYTES = 64 * 2**20


def suits(group: Any, device: torch.device) -> bool:
    """Whether the collectives here are faster than the backend's: gloo, on the CPU, with more than one rank."""
    return device.type == "cpu" and dist.get_backend(group) == "gloo" and dist.get_world_size(group) > 1


class KeptMemory:
    """Memory on the CPU that one collective after the other uses."""

    _kept: Tensor | None = None

    def space(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A one-dimensional tensor, which the next one overwrites, unless it is too large to be kept."""
        if numel * dtype.itemsize > _KEPT_BYTES:
            return torch.empty(numel, dtype=dtype)
        if self._kept is None:
            self._kept = torch.empty(_KEPT_BYTES, dtype=torch.uint8)
        return self._kept.view(dtype)[:numel]


class Reduction:
    """Reduces parts. It is an object so that a counter can put itself in front of the methods of this one object."""

    def __init__(self) -> None:
        self._received = KeptMemory()

    def reduce_parts(self, flat: Tensor, widths: Sequence[int], group: Any, out: Tensor | None = None) -> Tensor:
        """Sum the parts of all ranks; a collective.

        To this rank's own part the others are added in the order of the ranks, so that a sum is the same in every run.
        With two ranks it has the bits of an all-reduce.

        Args:
            flat: The parts of all ranks, one after the other: one-dimensional and contiguous.
            widths: The number of elements of each rank's part; the same on all ranks.
            group: The process group.
            out: Where to put the sum; None: into this rank's part of ``flat``. The other parts stay as they were.

        Returns:
            This rank's part of the sum.
        """
        rank, world = dist.get_rank(group), len(widths)
        offsets = [0, *accumulate(widths)]
        own = flat[offsets[rank] : offsets[rank + 1]]
        is_sent = rank not in (0, world - 1)  # at an end, its own part can stay where it is
        if not is_sent:
            flat = flat[offsets[1] :] if rank == 0 else flat[: offsets[rank]]
        for part in self._exchanged(flat, widths, is_sent, group):
            own = torch.add(own, part, out=own if out is None else out)
        return own

    def add_parts(self, parts: tuple[Tensor, Tensor], widths: Sequence[int], group: Any) -> None:
        """The same where this rank's own part lies elsewhere; a collective.

        Args:
            parts: This rank's own part, to which those of the other ranks are added; and the parts of the other ranks,
                one after the other, which stay as they were. Both one-dimensional and contiguous.
            widths: The number of elements of each rank's part; the same on all ranks.
            group: The process group.
        """
        own, others = parts
        for part in self._exchanged(others, widths, False, group):
            own.add_(part)

    def _exchanged(self, flat: Tensor, widths: Sequence[int], with_own: bool, group: Any) -> Iterator[Tensor]:
        """Send parts to the ranks that they belong to.

        Yields:
            This rank's part, of each other rank.
        """
        rank, world = dist.get_rank(group), len(widths)
        sent, received = list(widths), [widths[rank]] * world
        if not with_own:
            sent[rank] = received[rank] = 0
        arrived = self._received.space(sum(received), flat.dtype)
        dist.all_to_all_single(arrived, flat, received, sent, group=group)
        for other, part in enumerate(arrived.split(received)):
            if other != rank:
                yield part


#: The one that everybody uses.
reduction = Reduction()
#: For what is packed to be reduced, until its average has been used.
packed = KeptMemory()


class Lingering:
    """Tensors that gloo's threads still know: they let go of them a little after the collective is over.

    Until then the memory has one more holder than it will have, on this rank and perhaps on no other.
    """

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[Tensor]] = []

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Note tensors whose collective is over. The caller drops them, and nobody else has these objects."""
        self._tensors = [each for each in self._tensors if each() is not None]
        self._tensors += map(weakref.ref, tensors)

    def let_go(self) -> None:
        """Wait until gloo's threads have let go of all of them; not for ever, should a debugger have one."""
        end = time.monotonic() + _PATIENCE_S
        while self._tensors and time.monotonic() < end:
            time.sleep(1e-5)  # such a thread waits for this core, or, at the very end, for Python's lock
            self._tensors = [each for each in self._tensors if each() is not None]


#: Of all gathers.
lingering = Lingering()


def begin_gather(parts: Sequence[Tensor], group: Any) -> list[Any]:
    """Give all ranks the parts of all ranks; a collective.

    Args:
        parts: A contiguous tensor for each rank, of any length: this rank's own is sent, and the others are written.
        group: The process group.

    Returns:
        The handles to wait for.
    """
    return [
        dist.broadcast(part, dist.get_global_rank(group, rank), group=group, async_op=True)
        for rank, part in enumerate(parts)
        if part.numel()
    ]


def gather_parts(parts: Sequence[Tensor], group: Any) -> None:
    """:func:`begin_gather`, and wait."""
    for work in begin_gather(parts, group):
        work.wait()
