"""Weights of stage 3 whose memory somebody else has, see :mod:`lightning_zeroplus.weights.holders`.

A step releases all weights. Those that are held are gathered again after it, into the memory that they had, and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zeroplus.engine.gathering.resident import own_parameters
from lightning_zeroplus.weights.holders import holders, leave
from lightning_zeroplus.weights.partitioned.access import is_in_partition, memory_of


class User(str, Enum):
    """What uses a gathered weight, besides modules."""

    DIFFERENTIATED = "second derivative"
    RECOMPUTED = "recomputed forward"
    TRANSFORMED = "transformed by torch.func"
    READ = "read outside of its module"
    HELD = "held by another tensor"
    SEEN = "held by another tensor at the end of its module, perhaps by a graph"
    ELSEWHERE = "used by another rank"


def keep(kept: set[Any], param: Any, user: User) -> None:
    """Note that a weight has such a user, and is in ``kept``."""
    param.ds_active_sub_modules.add(user)
    kept.add(param)


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


class KeepsForSecondDerivatives:
    """Mixin for upstream's ``DeepSpeedZeRoOffload``.

    Attributes:
        kept: The coordinator's.
        release_all: Releases all weights.
    """

    kept: set[Any]
    release_all: Callable[[], None]

    def partition_all_parameters(self) -> None:
        """Release all weights before a step."""
        self.release_all()

    def post_sub_module_backward_function(self, sub_module: nn.Module) -> None:
        """The backward of a module is done; with ``create_graph=True`` its weights are part of a new graph."""
        if torch.is_grad_enabled():
            for param in own_parameters(sub_module):
                keep(self.kept, param, User.DIFFERENTIATED)
        super().post_sub_module_backward_function(sub_module)  # type: ignore[misc]
