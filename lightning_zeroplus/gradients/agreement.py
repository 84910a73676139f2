"""Whether all ranks do the same."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
import torch.distributed as dist


def is_equal_on_all_ranks(value: int, device: torch.device, group: Any = None) -> bool:
    """Whether all ranks give the same number; one reduction of two integers.

    Args:
        value: Its absolute value is below ``2**63``.
        device: Where it is reduced.
        group: The ranks; None: all.
    """
    extremes = torch.tensor([value, -value], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, negated_smallest = extremes.tolist()
    return bool(largest == -negated_smallest)


class RankAgreement:
    """Compares, in every step, which gradients the ranks have put into reduction buckets, and what they have gathered.

    Where ranks take different branches of a model, a bucket of one rank is averaged with another bucket of the other:
    the sizes may agree, and then nothing is raised. One reduction of two integers tells. It runs while the step is
    prepared, and is waited for before the step changes anything.

    Args:
        device: Where the integers are reduced.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._history = 0  # a fingerprint of the parameters so far
        self._running: tuple[Any, torch.Tensor] | None = None

    def note(self, index: int) -> None:
        """This rank reduces, or gathers, a parameter."""
        self._history = hash((self._history, index)) >> 1  # its negative is an int64 too

    def start(self) -> None:
        """A step begins."""
        if dist.get_world_size() > 1:
            extremes = torch.tensor([self._history, -self._history], device=self.device)
            self._running = dist.all_reduce(extremes, op=dist.ReduceOp.MAX, async_op=True), extremes

    def check(self) -> None:
        """The step is about to update the weights.

        Raises:
            RuntimeError: On all ranks, if they do not agree; this step has updated nothing.
        """
        if self._running is None:
            return
        (work, extremes), self._running = self._running, None
        work.wait()
        if int(extremes.sum()):  # the largest less the smallest
            raise RuntimeError(
                "The ranks have differentiated different parameters since the last optimizer step, so their collectives"
                " do not match and the gradients are wrong. At ZeRO stages 2 and 3, and under FSDP2, every rank must"
                " use the same parameters in each backward: use stage 0 or 1, or add `0 * parameter.sum()` of the"
                " unused ones to the loss."
            )


class Presence:
    """Which parameters have a gradient on some rank; one reduction of a byte per parameter, while others run.

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
        self._flags = torch.tensor(flags, dtype=torch.uint8, device=device)
        self._work = None
        if self._members and dist.get_world_size(group=group) > 1:
            self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def result(self) -> set[int]:
        """The members with a gradient on some rank. It is waited for only if this rank lacks one."""
        if self._everything_here:
            return set(self._members)  # whatever the others have
        if self._work is not None:
            self._work.wait()
        return {self._members[position] for position in self._flags.nonzero().flatten().tolist()}
