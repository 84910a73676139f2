"""Buckets of whole parameters, of which each rank owns an equal part (stage 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from torch import Tensor, nn

from lightning_zeroplus.engine.reduction.exchange import Exchange, Piece
from lightning_zeroplus.engine.upstream.probe import has
from lightning_zeroplus.gradients.ranks import gloo
from lightning_zeroplus.gradients.shown import read_plain

if TYPE_CHECKING:
    from lightning_zeroplus.engine.host import EngineHost

_AVERAGE = "the average of a bucket at ZeRO 3"


class AveragesParameters:
    """The part of a gradient accumulation that knows who owns what of a parameter."""

    engine: EngineHost
    optimizer: Any
    params: list[nn.Parameter]
    index: dict[int, int]

    def __init__(self, *args: Any) -> None:
        self._known_pieces: dict[tuple[int, int], list[Piece]] = {}
        super().__init__(*args)

    def averages_on_gloo(self, params: Sequence[Any], dtype: torch.dtype) -> list[Tensor] | None:
        """This rank's averaged part of each gradient of a bucket; None: upstream's collective suits better."""
        if not has(_AVERAGE):
            return None
        optimizer = self.optimizer
        group = optimizer._get_param_partition_group(params[0])
        world_size = dist.get_world_size(group=group)
        if (
            not gloo.suits(group, self.engine.device)
            or not optimizer.reduce_scatter
            or optimizer.all2all_process_group is not None
            or (optimizer.postscale_gradients and optimizer.gradient_predivide_factor != 1.0)
            or world_size < dist.get_world_size(group=optimizer.dp_process_group)  # an expert's, averaged over more
        ):
            return None
        bucket = [list(pieces) for pieces in zip(*(self._pieces(param, world_size) for param in params), strict=True)]
        grads = {self.index[id(param)]: read_plain(param) for param in params}
        averages = Exchange(group, dtype, self.engine.device, True).average(bucket, grads, by_parameters=True)
        return [average.to(optimizer.gradient_accumulation_dtype) for _, average in averages]

    def _pieces(self, param: Any, world_size: int) -> list[Piece]:
        index = self.index[id(param)]
        if (found := self._known_pieces.get((index, world_size))) is None:
            # Each rank owns as many elements as the last but one; the last one's may be padded.
            part, numel = param.partition_numel(), param.ds_numel
            starts = [min(rank * part, numel) for rank in range(world_size + 1)]
            found = [Piece(index, start, end - start) for start, end in zip(starts[:-1], starts[1:], strict=True)]
            self._known_pieces[index, world_size] = found
        return found
