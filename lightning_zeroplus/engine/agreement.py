"""Whether all ranks do the same."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist

_CHECK_FIRST_STEPS = 4
_CHECK_EVERY_STEPS = 16


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
    """Compares, now and then, which parameters' gradients the ranks have put into reduction buckets.

    Where ranks take different branches of a model, a bucket of one rank is averaged with another bucket of the other:
    the sizes may agree, and then nothing is raised. One reduction of two integers tells. It is made in each of the
    first steps, later in every 16th for all steps since, because even that costs 2 % of a small CPU step.

    Args:
        device: Where the integers are reduced.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._history = 0  # a fingerprint of the parameters so far
        self._steps = 0

    def note(self, index: int) -> None:
        """This rank reduces a parameter."""
        self._history = hash((self._history, index)) >> 1  # its negative is an int64 too

    def check(self) -> None:
        """A step begins.

        Raises:
            RuntimeError: On all ranks, if they do not agree; this step has updated nothing.
        """
        if dist.get_world_size() == 1:
            return
        self._steps += 1
        if self._steps > _CHECK_FIRST_STEPS and self._steps % _CHECK_EVERY_STEPS:
            return
        if not is_equal_on_all_ranks(self._history, self._device):
            raise RuntimeError(
                "The ranks have differentiated different parameters in one of the last"
                f" {_CHECK_EVERY_STEPS} optimizer steps, so their reduction buckets do not match and the gradients are"
                " wrong. At ZeRO stages 2 and 3 every rank must use the same parameters in each backward: use stage 0"
                " or 1, or add `0 * parameter.sum()` of the unused ones to the loss."
            )
