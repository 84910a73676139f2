"""The gathers of stage 3 on gloo: broadcasts in place of its all-gather, which takes several times as long.

Upstream's buffers and handles stay as they are. The collective is another one, and large weights are gathered where
they belong: upstream would gather several into one buffer and copy each of them out of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor
from torch import distributed as dist

from lightning_zeroplus.engine.gathering.held import is_held
from lightning_zeroplus.engine.gathering.resident import is_special
from lightning_zeroplus.engine.upstream.probe import has
from lightning_zeroplus.gradients.patches.replacement import Replacement
from lightning_zeroplus.gradients.ranks import gloo
from lightning_zeroplus.weights.partitioned.access import memory_of

#: Elements. To copy fewer takes less time than a collective of their own.
_LARGE = 2**18
#: Elements that are gathered together after a step, in memory that is kept.
_TOGETHER = 2**20
_THERE = ZeroParamStatus.AVAILABLE
_FEATURE = "one function for all gathers of ZeRO 3"
_NAME = "_dist_allgather_fn"
_upstream: Any = getattr(partition_parameters, _NAME, None)


def _all_gather(input_tensor: Tensor, output_tensor: Tensor, group: Any = None) -> Any:
    if not gloo.suits(group, output_tensor.device):
        return _upstream(input_tensor, output_tensor, group)
    parts = output_tensor.view(-1).chunk(dist.get_world_size(group))
    own = parts[dist.get_rank(group)]
    if own.data_ptr() != input_tensor.data_ptr():
        own.copy_(input_tensor.view(-1))
    return gloo.Gather(parts, group)


_replacement = Replacement(partition_parameters, _NAME, _all_gather)


def collectives(params: Iterable[Any], forward: bool) -> list[list[Any]]:
    """Which weights one collective gathers, in the order of their use; the same on all ranks.

    Args:
        params: Partitioned weights, in any order.
        forward: Whether a forward uses them, and not a backward.
    """
    listed = sorted(params, key=lambda param: param.ds_id)
    if not has(_FEATURE) or not any(map(_is_alone, listed)):
        return [listed]
    together: list[Any] = []
    alone: list[Any] = []
    for param in listed if forward else reversed(listed):
        (alone if _is_alone(param) else together).append(param)
    return [each for each in (together, *([param] for param in alone)) if each]


def _is_alone(param: Any) -> bool:
    return (
        param.ds_numel >= _LARGE
        and not is_special(param)
        and gloo.suits(param.ds_process_group, param.ds_tensor.device)
    )


def faster_gathers() -> AbstractContextManager[None]:
    """Within, upstream's gathers of partitioned weights are faster on gloo."""
    return _replacement() if has(_FEATURE) else nullcontext()


class _Together(NamedTuple):
    """Weights that are gathered together.

    Attributes:
        params: The weights.
        rows: Of each rank, its parts of them: where they are received.
        parts: By weight, its part in each row, as far as the rank has one.
    """

    params: list[Any]
    rows: list[Tensor]
    parts: list[Tensor]


class UpdatesInPlace:
    """After a step: brings the partitions of weights that stay to all ranks, into the memory that the weights have.

    Upstream releases the weights before the step, and gathers them into other memory. That is some ten functions for
    each weight, and whoever has its memory has old values.

    Args:
        params: The weights, of one process group; the same on all ranks.
    """

    def __init__(self, params: Iterable[Any]) -> None:
        self._params = list(params)
        self._group = self._params[0].ds_process_group
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._places: dict[int, tuple[int, list[Tensor]]] = {}
        self._alone = [param for param in self._params if param.ds_numel >= _LARGE]
        self._together: list[_Together] = []
        by_dtype: dict[torch.dtype, list[Any]] = {}
        for param in self._params:
            if param.ds_numel < _LARGE:
                by_dtype.setdefault(param.dtype, []).append(param)
        for dtype, listed in by_dtype.items():
            buffer = torch.empty(min(_TOGETHER, sum(param.ds_numel for param in listed)), dtype=dtype)
            begin, size = 0, 0
            for at, param in enumerate(listed):
                if size + param.ds_numel > _TOGETHER:
                    self._together.append(self._rows(listed[begin:at], buffer))
                    begin, size = at, 0
                size += param.ds_numel
            self._together.append(self._rows(listed[begin:], buffer))

    def _lengths(self, param: Any) -> list[int]:
        """The number of elements that each rank has of a weight, without padding."""
        length = param.ds_tensor.ds_numel
        return [max(0, min(length, param.ds_numel - length * rank)) for rank in range(self._ranks)]

    def _rows(self, params: list[Any], buffer: Tensor) -> _Together:
        lengths = [self._lengths(param) for param in params]
        widths = [sum(column) for column in zip(*lengths, strict=True)]
        rows = list(buffer[: sum(widths)].split(widths))
        by_rank = [row.split([each[rank] for each in lengths]) for rank, row in enumerate(rows)]
        parts = [part for of_param in zip(*by_rank, strict=True) for part in of_param if part.numel()]
        return _Together(params, rows, parts)

    @torch.no_grad()
    def run(self) -> None:
        """Gather; a collective. Weights that have been released are whole again, in memory of their own."""
        released = [param for param in self._params if param.ds_status is not _THERE]
        for param in released:
            memory_of(param, torch.empty(param.ds_shape, dtype=param.dtype))
        running = [self._gather_alone(param) for param in self._alone]
        for together in self._together:
            own = [self._own(param) for param in together.params]
            torch.cat(own, out=together.rows[self._rank])
            gloo.gather_parts(together.rows, self._group)
            torch._foreach_copy_([place for param in together.params for place in self._place(param)], together.parts)
        for gather in running:
            gather.wait()
        for param in released:
            param.ds_status = _THERE
        for param in self._params:
            if param._zeroplus_given and is_held(param):
                param.note_write()  # autograd does not count what others write to its memory
            else:
                param._zeroplus_given = False
                param.note_kept()

    def _gather_alone(self, param: Any) -> gloo.Gather:
        places, lengths = iter(self._place(param)), self._lengths(param)
        parts = [next(places) if length else torch.empty(0, dtype=param.dtype) for length in lengths]
        parts[self._rank].copy_(self._own(param))
        return gloo.Gather(parts, self._group)

    def _own(self, param: Any) -> Tensor:
        partition: Tensor = param.ds_tensor
        length = self._lengths(param)[self._rank]
        return partition if partition.numel() == length else partition.narrow(0, 0, length)

    def _place(self, param: Any) -> list[Tensor]:
        """The memory of a weight, by rank. These tensors do not own it: who has a weight's memory is counted."""
        address = param.data_ptr()
        known = self._places.get(param.ds_id)
        if known is None or known[0] != address:
            flat = gloo.same_memory(param).view(param.dtype)
            lengths = [length for length in self._lengths(param) if length]
            known = self._places[param.ds_id] = address, list(flat.split(lengths))
        return known[1]


def updates_in_place(params: Sequence[Any]) -> UpdatesInPlace | None:
    """What updates the weights that stay after a step; None: the backend's own gather is faster."""
    listed = [param for param in params if param.ds_numel]
    if len({param.ds_process_group for param in listed}) != 1:
        return None
    suits = gloo.suits(listed[0].ds_process_group, listed[0].ds_tensor.device)
    return UpdatesInPlace(listed) if suits else None
