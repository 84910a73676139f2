"""Faster collectives for tensors on the CPU, made of gloo's own.

Gloo's reduce-scatter all-reduces and throws most of the result away, and its all-gather sends everything around a ring
in one piece. Here a reduce-scatter is an all-to-all and a sum, which moves half the bytes of an all-reduce, and an
all-gather is one broadcast per rank, all at once, from and to the place where the result belongs. The parts of the
ranks may have any lengths, so that nothing needs padding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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


class Gather:
    """Gives all ranks the parts of all ranks; a collective, which is begun here.

    Gloo's threads let go of their tensors a little after a collective is over. What asks how many tensors have the
    memory of a weight would count theirs, on this rank and perhaps on no other. So gloo gets tensors that have the same
    memory and do not own it, and the parts themselves are kept here until nobody writes to them.

    Args:
        parts: A contiguous tensor for each rank, of any length: this rank's own is sent, and the others are written.
        group: The process group.
    """

    def __init__(self, parts: Sequence[Tensor], group: Any) -> None:
        self._parts: Sequence[Tensor] = parts
        self._works: list[Any] = []
        for rank, part in enumerate(parts):
            if part.numel():
                source = dist.get_global_rank(group, rank)
                self._works.append(dist.broadcast(same_memory(part), source, group=group, async_op=True))

    def wait(self) -> None:
        """Wait until the parts of all ranks are there."""
        while self._works:
            self._works.pop().wait()
        self._parts = ()

    def __del__(self) -> None:
        if self._works:  # after an exception
            _abandoned[:] = [each for each in _abandoned if not all(work.is_completed() for work in each[0])]
            _abandoned.append((self._works, self._parts))


#: Gathers that nobody has waited for, and their memory: gloo may still write to it.
_abandoned: list[tuple[list[Any], Sequence[Tensor]]] = []


def same_memory(part: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, in a tensor that does not own its memory: whoever does is counted elsewhere."""
    return torch.frombuffer((ctypes.c_char * part.nbytes).from_address(part.data_ptr()), dtype=torch.uint8)


def gather_parts(parts: Sequence[Tensor], group: Any) -> None:
    """:class:`Gather`, and wait."""
    Gather(parts, group).wait()
