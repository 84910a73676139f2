"""The collectives of FSDP2's units on gloo, which are faster than those of the backend."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from lightning_zeroplus.gradients.patches.replacement import Replacement
from lightning_zeroplus.gradients.ranks import gloo

_SIZE = "_get_dim0_padded_size"
_size = getattr(_fsdp_collectives, _SIZE, None)
_known_sizes = None if _size is None else Replacement(_fsdp_collectives, _SIZE, lru_cache(2**16)(_size))


class GlooAllGather(DefaultAllGather):
    """FSDP2's all-gather, made of broadcasts on gloo."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Gather into ``output_tensor``; its place for this rank may be ``input_tensor``."""
        if async_op or not gloo.suits(group, output_tensor.device):
            return super().__call__(output_tensor, input_tensor, group, async_op)
        parts = output_tensor.view(-1).chunk(group.size())
        own = parts[dist.get_rank(group)]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor.view(-1))
        gloo.gather_parts(parts, group)
        return None


class GlooReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, made of an all-to-all on gloo."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Reduce into ``output_tensor``. Other operations than sums and averages are left to the backend."""
        averages = op == dist.ReduceOp.AVG
        if async_op or not (averages or op == dist.ReduceOp.SUM) or not gloo.suits(group, output_tensor.device):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        widths = [output_tensor.numel()] * group.size()
        gloo.reduction.reduce_parts(input_tensor.view(-1), widths, group, out=output_tensor.view(-1))
        if averages:
            output_tensor.div_(group.size())
        return None


def use_gloo_comms(group: Any) -> None:
    """Give a group of parameters these collectives, unless the user has brought other ones.

    Relies on torch: ``set_custom_all_gather`` and ``set_custom_reduce_scatter`` set these attributes of each group.
    """
    if type(getattr(group, "_all_gather_comm", None)) is DefaultAllGather:
        group._all_gather_comm = GlooAllGather()
    if type(getattr(group, "_reduce_scatter_comm", None)) is DefaultReduceScatter:
        group._reduce_scatter_comm = GlooReduceScatter()


def with_known_sizes() -> AbstractContextManager[None]:
    """Within, FSDP2 computes the size that a gradient is padded to once, and not in every reduction."""
    return nullcontext() if _known_sizes is None else _known_sizes()
