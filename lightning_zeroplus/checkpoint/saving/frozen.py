"""Checkpoints without frozen weights: what tells them apart, and that a model has the same ones.

Each frozen parameter has a fingerprint: its dtype, its shape, and a sum over its elements of a hash of place and bits.
A sum does not depend on who adds what. So each rank hashes the elements that it keeps, one vector of sums is reduced,
and the result is the same at every stage and world size. No tensor is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_zeroplus.checkpoint.everywhere import everywhere

#: Where the ``meta.pt`` of ``zeroplus_fsdp`` has the fingerprints of what was left out.
FROZEN = "zeroplus_frozen"
_NAMED = 5
#: Elements that are hashed at once: a few int64 temporaries of this size.
_AT_ONCE = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers of 64 bits, as Python's and torch's signed integers.
_BITS, _PLACE, _FIRST, _SECOND = (
    number - (1 << 64) if number >> 63 else number
    for number in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class Fingerprint(NamedTuple):
    """What is known of a weight that was left out.

    Attributes:
        dtype: Its name in torch, such as ``"float32"``.
        shape: Of the whole tensor.
        bits: The sum over its elements, modulo 2 ** 64.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: int


def fingerprints(params: Mapping[str, Any], device: torch.device) -> dict[str, Fingerprint]:
    """Hash parameters, which may be whole on every rank, partitioned (stage 3) or sharded (FSDP2); a collective.

    Args:
        params: By name, the same names on all ranks; a tied one under each of its names.
        device: Of the collective.
    """
    sums: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for param in params.values():
            if id(param) not in sums:
                sums[id(param)] = sum(_hash(place, flat) for place, flat in _own(param))
        order = list(sums)
        total = torch.tensor([_signed(sums[each]) for each in order], dtype=torch.int64).to(device)
        if order and dist.is_initialized():
            dist.all_reduce(total)
        reduced = dict(zip(order, total.tolist(), strict=True))
        return {
            name: Fingerprint(str(param.dtype).removeprefix("torch."), _shape(param), reduced[id(param)])
            for name, param in params.items()
        }


class FrozenWeights:
    """Which weights the checkpoints of a fit leave out: frozen ones that are as they were when the fit began.

    A frozen weight that was written since, such as an averaged teacher's, is saved as any other.

    Args:
        params: Gives the module's parameters by name, as for :func:`fingerprints`.
        device: Of collectives.
    """

    def __init__(self, params: Callable[[], Mapping[str, nn.Parameter]], device: torch.device) -> None:
        self._params, self._device = params, device
        frozen = {name: param for name, param in params().items() if not param.requires_grad}
        self._before = fingerprints(frozen, device)

    def left_out(self) -> dict[str, Fingerprint]:
        """The fingerprints of what is left out now, by name; a collective."""
        params = self._params()
        now = fingerprints({name: params[name] for name in self._before if name in params}, self._device)
        return {
            name: found for name, found in now.items() if found == self._before[name] and not params[name].requires_grad
        }


def plain(frozen: Mapping[str, Fingerprint]) -> dict[str, list[Any]]:
    """Fingerprints as plain data, which a checkpoint may hold."""
    return {name: [each.dtype, list(each.shape), each.bits] for name, each in frozen.items()}


def check_frozen(
    path: str, stored: Mapping[str, Any], given: Collection[str], params: Mapping[str, Any], device: torch.device
) -> None:
    """Compare the weights that a checkpoint has left out with those of a model; a collective.

    Args:
        path: The checkpoint, for the message.
        stored: The checkpoint's fingerprints by name, as :func:`plain` data, the same on all ranks.
        given: Names of those that a hook has put into the checkpoint's ``state_dict``. They are loaded, not compared.
        params: The model's parameters by name, as for :func:`fingerprints`.
        device: Of the collective.

    Raises:
        RuntimeError: On every rank, if a parameter is missing or differs, with the names.
    """
    have = fingerprints({name: params[name] for name in stored if name in params}, device)
    wanted = {
        name: Fingerprint(dtype, tuple(shape), bits)
        for name, (dtype, shape, bits) in stored.items()
        if name not in given
    }
    everywhere(lambda: _compare(path, wanted, have))


def _compare(path: str, wanted: Mapping[str, Fingerprint], have: Mapping[str, Fingerprint]) -> None:
    problems = []
    for name, saved in wanted.items():
        found = have.get(name)
        if found is None:
            problems.append(f"{name} (the model has no such parameter)")
        elif found[:2] != saved[:2]:
            problems.append(f"{name} ({found.dtype} {found.shape} instead of {saved.dtype} {saved.shape})")
        elif found != saved:
            problems.append(f"{name} (other values)")
    if problems:
        raise RuntimeError(
            f"The checkpoint {path!r} was saved with `save_frozen=False`, without its frozen weights, and the frozen"
            f" weights of this model are others: {_some(problems)}. Give the model the weights that the checkpoint was"
            " trained with, in the same precision, before the fit. Nothing has been loaded."
        )


def cannot_export(path: Any, wanted: Mapping[str, Any]) -> str:
    """The error of an export of a checkpoint without its frozen weights."""
    return (
        f"The checkpoint {str(path)!r} was saved with `save_frozen=False`: {len(wanted)} frozen weights are not in it,"
        f" {_some(list(wanted))}. Load it into the model that has them, with `ckpt_path=`, under a strategy with"
        " `save_frozen=True`. Save that with `trainer.save_checkpoint`, and export what it has saved."
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _shape(param: Any) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))


def _own(param: Any) -> Iterator[tuple[int | Tensor, Tensor]]:
    """The elements that this rank hashes, flat, with the place of the first in the whole, or with all their places."""
    if hasattr(param, "ds_tensor"):  # partitioned, and padded at the end
        part = param.partition_numel()
        start = dist.get_rank(group=param.ds_process_group) * part
        numel = max(0, min(part, param.ds_numel - start))
        yield start, param.ds_tensor.detach().flatten()[:numel]
    elif isinstance(param, DTensor):
        yield from _of_sharded(param)
    else:  # on every rank: each hashes a share
        flat = param.detach().flatten()
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        start, end = flat.numel() * rank // ranks, flat.numel() * (rank + 1) // ranks
        yield start, flat[start:end]


def _of_sharded(param: DTensor) -> Iterator[tuple[int | Tensor, Tensor]]:
    place = param.device_mesh.get_coordinate()
    replicated = [index for index, each in enumerate(param.placements) if each.is_replicate()]
    if place is None or any(place[index] for index in replicated):
        return  # another rank has the same elements
    local, shape = param.to_local().detach(), param.shape
    for chunk in param.__create_chunk_list__():
        offsets = tuple(chunk.offsets)
        strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
        start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        if local.shape[1:] == shape[1:]:
            yield start, local.flatten()
            continue
        places = torch.full((), start, dtype=torch.int64, device=local.device)
        for dimension, stride in enumerate(strides):
            steps = torch.arange(local.shape[dimension], device=local.device) * stride
            places = places.unsqueeze(-1) + steps
        yield places.flatten(), local.flatten()


def _hash(places: int | Tensor, flat: Tensor) -> int:
    """The sum of hashes of elements at ``places``, or at consecutive places from ``places`` on."""
    total = 0
    for begin in range(0, flat.numel(), _AT_ONCE):
        some = flat[begin : begin + _AT_ONCE].contiguous()
        if isinstance(places, Tensor):
            where = places[begin : begin + _AT_ONCE]
        else:
            where = torch.arange(some.numel(), device=some.device) + (places + begin)
        words = some.view(_INTEGERS[min(some.element_size(), 8)]).to(torch.int64)
        if words.numel() > where.numel():  # complex128
            where = (2 * where.unsqueeze(-1) + torch.arange(2, device=where.device)).flatten()
        mixed = words * _BITS + (where + 1) * _PLACE
        mixed = (mixed ^ (mixed >> 31)) * _FIRST
        mixed = (mixed ^ (mixed >> 29)) * _SECOND
        total += int((mixed ^ (mixed >> 32)).sum())
    return total


def _signed(number: int) -> int:
    """``number`` modulo 2 ** 64, as an int64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
