"""Whether all ranks do the same."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Ranks, of which an all-gather of a byte per parameter is a small message.
_FEW = 8
#: Until torch 2.12, and from 2.13 on, which warns each time of the older name.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def sent_to(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """A vector on a device, which the host does not wait for: ``torch.tensor(values, device=device)`` would."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def is_equal_on_all_ranks(value: int, device: torch.device, group: Any = None) -> bool:
    """Whether all ranks give the same number; one reduction of two integers.

    Args:
        value: Its absolute value is below ``2**63``.
        device: Where it is reduced.
        group: The ranks; None: all.
    """
    return Comparison([value], device, group).result()[0]


class Comparison:
    """Whether all ranks give the same numbers; one reduction of two integers each, which runs from the beginning.

    Args:
        values: As for :func:`is_equal_on_all_ranks`; as many on all ranks.
        device: Where they are reduced.
        group: The ranks; None: all.
    """

    def __init__(self, values: Sequence[int], device: torch.device, group: Any = None) -> None:
        self._count = len(values)
        self._work = None
        if dist.get_world_size(group) > 1:
            self._extremes = sent_to(device, [*values, *(-value for value in values)], torch.int64)
            self._work = dist.all_reduce(self._extremes, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def result(self) -> list[bool]:
        """Wait for it: whether the ranks agree on each of the numbers."""
        if self._work is None:
            return [True] * self._count
        self._work.wait()
        largest, negated_smallest = self._extremes.view(2, -1).tolist()
        return [most == -least for most, least in zip(largest, negated_smallest, strict=True)]


class Announcement:
    """What each rank is about to do; one all-gather of integers, which runs from the beginning.

    Between more than two ranks it is made of an all-to-all: gloo sends what it gathers around a ring.

    Args:
        values: This rank's; as many on all ranks, each less than ``2**63`` in absolute value.
        group: The ranks, whose tensors are the host's.
    """

    def __init__(self, values: Sequence[int], group: Any) -> None:
        own, ranks = torch.tensor(values), dist.get_world_size(group)
        self._all = own.new_empty(ranks, len(values))
        if ranks > 2:
            self._work = dist.all_to_all_single(self._all.view(-1), own.repeat(ranks), group=group, async_op=True)
        else:
            self._work = getattr(dist, _ALL_GATHER)(self._all.view(-1), own, group=group, async_op=True)

    def result(self) -> list[list[int]]:
        """Wait for it: the values of each rank, in order."""
        self._work.wait()
        return self._all.tolist()


#: The process groups of fits that an error has ended on this rank.
_LEFT: list[Any] = []


def new_group_of_hosts() -> Any:
    """A new process group of all ranks, whose tensors are the host's. All ranks call it."""
    while _LEFT:
        _destroy(_LEFT.pop())
    return dist.new_group(backend="gloo")


def group_of_hosts(device: torch.device) -> Any:
    """The process group in which hosts agree: not the device's, whose answers a host waits for its kernels to read.

    All ranks call it. None is the group of all, if its tensors are the host's in any case.
    """
    return None if device.type == "cpu" or dist.get_world_size() == 1 else new_group_of_hosts()


def end_group(group: Any) -> None:
    """Destroy a process group; while an error is raised, leave it to the next fit.

    Its destruction would fail the collectives in which the other ranks wait. They would print errors that only follow
    from this one, and before it.

    Args:
        group: None: there is nothing to destroy.
    """
    if group is not None and sys.exc_info()[0] is not None:
        _LEFT.append(group)
    elif group is not None:
        _destroy(group)


def _destroy(group: Any) -> None:
    with suppress(ValueError):  # it ended with the default group
        if dist.is_initialized():
            dist.destroy_process_group(group)


class Fingerprint:
    """Of a sequence of numbers: the same for the same sequence, in any process.

    Attributes:
        value: Less than ``2**62`` in absolute value.
    """

    value = 0

    def note(self, number: int) -> None:
        """The sequence goes on."""
        self.value = hash((self.value, number)) >> 1


class Presence:
    """Which parameters have a gradient on some rank; one reduction of a byte per parameter, while others run.

    Between few ranks on the CPU it is an all-gather: gloo's takes less time than its reduction.

    Args:
        members: The parameters in question, by index; the same on all ranks.
        here: Those that have a gradient on this rank.
        device: Where the bytes are reduced.
        group: The ranks.
    """

    def __init__(self, members: Iterable[int], here: Container[int], device: torch.device, group: Any = None) -> None:
        self._members = sorted(members)
        flags = [index in here for index in self._members]
        self._everything_here = all(flags)
        self._flags = sent_to(device, flags, torch.uint8)
        self._work = None
        ranks = dist.get_world_size(group=group) if self._members else 1
        if 1 < ranks <= _FEW and device.type == "cpu":
            own, self._flags = self._flags, self._flags.new_empty(ranks, len(flags))
            self._work = getattr(dist, _ALL_GATHER)(self._flags.view(-1), own, group=group, async_op=True)
        elif ranks > 1:
            self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def result(self) -> set[int]:
        """The members with a gradient on some rank. It is waited for only if this rank lacks one."""
        if self._everything_here:
            return set(self._members)  # whatever the others have
        if self._work is not None:
            self._work.wait()
        somewhere = self._flags.view(-1, len(self._members)).any(0)
        return {self._members[position] for position in somewhere.nonzero().flatten().tolist()}
