"""Weights of stage 3 whose memory somebody else has, see :mod:`lightning_zeroplus.weights.holders`.

A step releases all weights. Those that are held are gathered again after it, into the memory that they had, and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_zeroplus.weights.holders import holders, leave
from lightning_zeroplus.weights.partitioned.access import is_in_partition, memory_of


def is_held(param: Any) -> bool:
    """Whether another tensor has the memory of a gathered weight.

    Only a weight that stays gathered, or that a user's code has got, is asked. The answer is the same on all ranks:
    the collective that has gathered a weight does not hold its memory, see :class:`gloo.Gather`. Otherwise some ranks
    would keep what the others release, and the ranks would have to announce all that they gather.
    """
    asked = param.ds_persist or param._zeroplus_given
    return bool(asked) and holders(param) > 1 and not is_in_partition(param)


class Held:
    """The memory of the weights that are held, from before a step until they are gathered again.

    Attributes:
        memory: By weight.
    """

    def __init__(self) -> None:
        self.memory: dict[Any, Tensor] = {}

    def note(self, param: Any) -> bool:
        """Before a gathered weight is released: note its memory, if it is held; returns whether it is."""
        found = is_held(param)
        if found:
            param.note_write()  # autograd does not count what is written by `p.data`
            self.add(param, memory_of(param))
        return found

    def add(self, param: Any, memory: Tensor) -> None:
        """Note that the memory of a weight is held."""
        self.memory[param] = memory

    def leave(self) -> None:
        """Leave what is held to the next engine."""
        for param, memory in self.memory.items():
            leave(param, memory)
        self.memory = {}

    @torch.no_grad()
    def restore(self, gather: Callable[[Iterable[Any]], None], keep: Callable[[Any], None]) -> None:
        """Gather what is held into its memory.

        Args:
            gather: Gathers weights.
            keep: Lets a weight stay gathered until the next step.
        """
        if not self.memory:
            return
        held, self.memory = self.memory, {}
        gather(held)
        for param, memory in held.items():
            take_place(param, memory)
            keep(param)


def take_place(param: Any, memory: Tensor) -> None:
    """Move a gathered weight to the memory that it had before."""
    memory.copy_(memory_of(param))
    memory_of(param, memory)
    param._zeroplus_given = True
    param.note_write()
