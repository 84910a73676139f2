"""Weights that stay whole from one backward to the next, if no step comes between: one gather for all."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from lightning_zeroplus.fsdp.in_step import GroupInStep
from lightning_zeroplus.gradients.patches.replacement import Replacement
from lightning_zeroplus.gradients.patches.transforms import outside_transforms

#: With which FSDP2 asks, for each parameter, whether what was accumulated has to be cast; until torch 2.14.
_CAST = "to_accumulated_grad_if_needed"
_without_casts = Replacement(FSDPParam, _CAST, lambda param: None) if hasattr(FSDPParam, _CAST) else nullcontext


class KeepingGroup(GroupInStep):
    """Mixin of a unit's group, bound at run time: it may stay unsharded after a backward.

    The next forward uses what is there without a gather, unless a shard was written since. Whatever changes weights
    shards the unit before.

    Only units that stay whole from their forward to their backward do so. All of them are whole when a backward begins;
    so what is kept adds little to the highest memory.

    Attributes:
        keeps: Another backward follows before the step.
        links: The parameters, each a :class:`~.whole.link.Link`.
    """

    keeps = False
    links: list[Any]
    _kept: int | None = None  # how often the shards had been written when the unit stayed unsharded

    @property
    def stays(self) -> bool:
        """Whether the unit is unsharded only for the next forward."""
        return self._kept is not None and self.is_unsharded

    def post_backward(self, *unused: Any) -> None:
        """End a backward. FSDP2 shards the unit then."""
        if not self.keeps or self._reshard_after_forward or len(self.links) < len(self.fsdp_params):
            super().post_backward(*unused)
            return
        before, self.reshard_after_backward = self.reshard_after_backward, False
        try:
            casts = self.reduce_grads or any(param.reduce_dtype is not None for param in self.fsdp_params)
            with nullcontext() if casts else _without_casts():
                super().post_backward(*unused)
        finally:
            self.reshard_after_backward = before
        self._kept = self._writes()

    def _to_sharded(self) -> None:
        self._kept = None
        super()._to_sharded()

    @outside_transforms()
    def unshard(self, async_op: bool = False) -> None:
        """Gather, unless the weights are there and were not written."""
        if self.stays and self._kept != self._writes():
            self._to_sharded()
        super().unshard(async_op)

    def give_back(self) -> None:
        """Shard a unit that was only kept for the next forward."""
        if self.stays and not self.in_pass:  # type: ignore[attr-defined]
            self._to_sharded()
        self._kept = None

    def _writes(self) -> int:
        """How often the shards were written; other writes shard the unit before they change anything."""
        return sum([link.sharded._local_tensor._version for link in self.links])
