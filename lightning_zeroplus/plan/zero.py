"""What the plans of ZeRO stages 1 to 3 share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_zeroplus.plan.model import Model, Weight
from lightning_zeroplus.plan.settings import Settings
from lightning_zeroplus.precision.conversions import low_precision_dtype

FP32 = torch.float32.itemsize
#: Bytes of an element that is compared before a step, with its master weight: which were written, and both in fp32.
COMPARED = 1 + 2 * FP32
#: How many are compared at once: the engine's number for devices.
COMPARED_AT_ONCE = 2**24


class Zero(NamedTuple):
    """What is planned.

    Attributes:
        model: What is trained.
        settings: Of the strategy.
        ranks: Their number.
        backwards: Of a step.
        window: Whether they share one reduction; always at stage 1.
        offload: Whether ``offload="cpu"``.
        overlaps: Whether hooks reduce while a backward goes on, if the settings let them: not at stage 1.
    """

    model: Model
    settings: Settings
    ranks: int
    backwards: int
    window: bool
    offload: bool
    overlaps: bool = True

    @property
    def low(self) -> torch.dtype | None:
        """The dtype of all weights; None: their own, in which the optimizer updates them."""
        return low_precision_dtype(self.model.precision)

    @property
    def master(self) -> int:
        """Bytes of a master weight; 0: the module's weight is the master weight."""
        return 0 if self.low is None else FP32

    @property
    def compares(self) -> bool:
        """Whether partitions are compared with their master weights on the device."""
        return bool(self.master) and not self.offload

    def comparing(self, elements: int) -> int:
        """Bytes that it takes to compare so many elements."""
        return COMPARED * min(elements, COMPARED_AT_ONCE) if self.compares else 0

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of gradients that wait, and of averages."""
        return self.settings.sum_dtype(self.model)

    @property
    def sum(self) -> int:
        """Bytes of an element in it."""
        return self.sum_dtype.itemsize

    @property
    def wire(self) -> int:
        """Bytes of an element in a reduction."""
        return self.settings.wire_dtype(self.model).itemsize

    @property
    def bucket(self) -> int:
        """Elements of a bucket."""
        return self.settings.bucket_elements(self.model, self.overlaps)

    @property
    def optimized(self) -> list[Weight]:
        """The weights that are partitioned, group by group."""
        return [weight for group in self.model.grouped() for weight in group]

    @property
    def whole(self) -> list[Weight]:
        """The other weights."""
        return [weight for weight in self.model.weights if not weight.trains or weight.group is None]

    def needs(self, parts: Sequence[int]) -> tuple[int, list[int], tuple[str, ...]]:
        """Bytes of all states, bytes of working memory by group, and notes.

        Args:
            parts: How many elements of each group a rank updates.
        """
        states, working = 0, []
        notes: dict[str, None] = {}
        optimizers = self.model.optimizers
        for index, (group, part) in enumerate(zip(self.model.grouped(), parts, strict=True)):
            if not group:
                working.append(0)
                continue
            shared = 1
            tensors: list[tuple[Sequence[int], torch.dtype]] = [((part,), torch.float32)]
            if optimizers.needs_whole(index):
                shared, tensors = self.ranks, [(weight.shape, torch.float32) for weight in group]
                name = type(optimizers.groups[index][0]).__name__
                notes[f"`{name}` updates whole tensors; its states are counted as spread evenly over the ranks"] = None
            need = optimizers.need(index, tensors)
            states += -(-need.states // shared)
            working.append(-(-need.working // shared))
        return states, working, tuple(notes)
