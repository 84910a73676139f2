"""HSDP: gradients that are reduced among the shards of each replica wait for one all-reduce among the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from lightning_zeroplus.fsdp.late_grads import grad_dtype
from lightning_zeroplus.fsdp.whole.layout import as_stored


class ReplicatedGroup(FSDPParamGroup):
    """Mixin of a unit's group, bound at run time: it knows which parameters are in the sum that waits.

    Relies on FSDP2: while ``all_reduce_grads`` is False, each reduction is added to ``_partial_reduce_output``, and
    the next one with an all-reduce adds that sum. The sum is flat, in the order of the parameters that had a gradient.
    FSDP2 supposes that these are the same parameters in each backward. If they are others, it fails, or adds the
    gradients of one parameter to those of another.
    """

    _members: tuple[int, ...] = ()

    @property
    def waiting(self) -> tuple[int, ...]:
        """The positions of the parameters whose gradients wait for the other replicas."""
        return self._members if self._partial_reduce_output is not None else ()

    def fill_in(self) -> None:
        """Give waiting parameters a gradient of zero, if the group is about to be reduced without them."""
        waiting = self.waiting
        if not waiting:
            return
        with as_stored():
            there = self._reduced()
            for position in set(waiting) - set(there) if there else ():
                param = self.fsdp_params[position]._unsharded_param
                param.grad = torch.zeros(param.shape, dtype=grad_dtype(param), device=param.device)

    def post_backward(self, *unused: Any) -> None:
        members = self._reduced() if self.reduce_grads and is_replicated(self) else ()
        if members and self.waiting not in ((), members):
            self._arrange(members)
        super().post_backward(*unused)
        if members:
            self._members = members

    def _reduced(self) -> tuple[int, ...]:
        takes_all = getattr(self, "reduce_scatter_unused_params", False)
        with as_stored():
            return tuple(
                position
                for position, param in ((position, self.fsdp_params[position]) for position in self._order())
                if hasattr(param, "_unsharded_param")
                and (
                    param._unsharded_param.grad is not None
                    or param.unsharded_accumulated_grad is not None
                    or (takes_all and param._unsharded_param.requires_grad)
                )
            )

    def _order(self) -> Sequence[int]:
        """The positions of all parameters, in the order of a reduction: from torch 2.15 on by dtype."""
        return getattr(self, "_reduce_scatter_param_indices", range(len(self.fsdp_params)))

    def sums(self) -> dict[int, Tensor]:
        """What waits, by the position of its parameter: this rank's flat shard, padded."""
        flat = self._partial_reduce_output
        if flat is None:
            return {}
        return dict(zip(self._members, flat.split([self._size(each) for each in self._members]), strict=True))

    def add_sum(self, position: int, value: Tensor) -> None:
        """Add to what waits for a parameter."""
        members = {*self.waiting, position}
        self._arrange(tuple(each for each in self._order() if each in members), like=value)
        with self._on_stream():
            self.sums()[position].add_(value)

    def drop_sums(self, params: set[int] | None = None, set_to_none: bool = True) -> None:
        """Drop what waits for the unsharded parameters with these ``id``, or zero it; None: for all."""
        dropped = {
            position
            for position in self.waiting
            if params is None or id(self.fsdp_params[position]._unsharded_param) in params
        }
        if not set_to_none:
            with self._on_stream():
                for position in dropped:
                    self.sums()[position].zero_()
        elif dropped:
            self._arrange(tuple(position for position in self.waiting if position not in dropped))

    def _arrange(self, members: tuple[int, ...], like: Tensor | None = None) -> None:
        """Let the sum have these parameters; what is new is zero."""
        held = self.sums()
        like = next(iter(held.values()), like)
        assert like is not None
        with self._on_stream():
            parts = [held[each] if each in held else like.new_zeros(self._size(each)) for each in members]
            self._partial_reduce_output = torch.cat(parts) if parts else None
        self._members = members
        if hasattr(self, "_partial_reduce_output_layout"):  # FSDP2's own note of the members, from torch 2.15 on
            sizes = [self._size(each) for each in members]
            places = zip(accumulate(sizes, initial=0), sizes, strict=False)
            params = (self.fsdp_params[each] for each in members)
            self._partial_reduce_output_layout = dict(zip(params, places, strict=True))

    def _size(self, position: int) -> int:
        return int(self.fsdp_params[position].padded_sharded_param_size.numel())

    def _on_stream(self) -> Any:
        return self.device_handle.stream(self.comm_ctx.reduce_scatter_stream)  # where FSDP2 itself adds


def is_replicated(group: Any) -> bool:
    """Whether the group's parameters are on several replicas, whose gradients are all-reduced."""
    return isinstance(group.mesh_info, HSDPMeshInfo)
