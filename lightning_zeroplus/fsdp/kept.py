"""Whole weights that stay in memory from one backward to the next, if no step comes between: one gather for all."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from lightning_zeroplus.fsdp.in_step import GroupInStep
from lightning_zeroplus.gradients.patches.replacement import Replacement
from lightning_zeroplus.gradients.patches.transforms import outside_transforms

_without_freeing = Replacement(FSDPParam, "free_unsharded_param", lambda param: None)


class KeepingGroup(GroupInStep):
    """Mixin of a unit's group, bound at run time: while sharded, it may keep what it has gathered.

    Between two backwards the module has its sharded parameters, as under FSDP2. But the memory of the unsharded ones is
    not given back, and the next forward uses it without a gather, unless a shard was written since.

    Only units that stay whole from their forward to their backward do so. All of them are whole when a backward begins;
    so what is kept adds little to the highest memory.

    Attributes:
        keeps: Another backward follows before the step.
        links: The parameters, each a :class:`~.whole.link.Link`.
    """

    keeps = False
    links: list[Any]
    _kept: int | None = None  # how often the shards had been written when they were gathered

    @property
    def is_kept(self) -> bool:
        """Whether the memory of the unsharded parameters is there although the unit is sharded."""
        return self._kept is not None

    def _to_sharded(self) -> None:
        if not self.keeps or self._reshard_after_forward or self.is_sharded or len(self.links) < len(self.fsdp_params):
            super()._to_sharded()
            return
        with _without_freeing():
            super()._to_sharded()
        self._kept = self._writes()

    def _to_unsharded(self) -> None:
        self._kept = None
        super()._to_unsharded()

    @outside_transforms()
    def unshard(self, async_op: bool = False) -> None:
        """Gather, or use what is kept."""
        if self._kept is not None and self.is_sharded and self._all_gather_result is None:
            if self._kept == self._writes():
                self._to_unsharded()
                return
            self.give_back()
        super().unshard(async_op)

    def is_whole(self) -> bool:
        """Whether the next forward needs no gather."""
        return self.is_unsharded or (self._kept is not None and self._kept == self._writes())

    def give_back(self) -> None:
        """Give back the memory of kept weights: they are about to change, or are not needed any more."""
        if self._kept is not None:
            self._kept = None
            for param in self.fsdp_params:
                param.free_unsharded_param()

    def _writes(self) -> int:
        """How often the shards were written; other writes give back what is kept before they change anything."""
        return sum([link.sharded._local_tensor._version for link in self.links])
