"""Tensors of rank 0 for all ranks: weights and buffers before a fit, as under DDP, and buffers while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

#: Of tensors that are broadcast together, which bounds the copies.
_BYTES = 64 * 2**20


def begin_alike(module: nn.Module, device: torch.device) -> None:
    """Give every rank the weights and buffers of rank 0; a collective.

    Ranks that draw their own initial weights would otherwise train, under FSDP2, a model of parts of each of them.

    Args:
        module: The module. What it has on the meta device, or in partitions, is left alone.
        device: The device of the broadcasts.

    Raises:
        ValueError: On every rank, if another rank has other parameters or buffers, naming the first.
    """
    if dist.get_world_size() == 1:
        return
    _check_alike(module)
    params = (param.data for param in module.parameters() if not is_lazy(param))
    broadcast_tensors([*params, *module.buffers()], device)


def _check_alike(module: nn.Module) -> None:
    mine = [*map(_describe, module.named_parameters()), *map(_describe, module.named_buffers())]
    all_of_them: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    for rank, others in enumerate(all_of_them):
        for left, right in zip_longest(all_of_them[0], others, fillvalue="nothing"):
            if left != right:
                raise ValueError(
                    f"The ranks have different modules: rank 0 has {left} where rank {rank} has {right}. Build the"
                    " same module on every rank. What a rank does not use needs no gradient."
                )


def _describe(named: tuple[str, Tensor]) -> str:
    name, tensor = named
    if is_lazy(tensor):
        return f"{name!r}, not initialized"
    where = " on the meta device" if tensor.is_meta else ""
    return f"{name!r} of {tuple(getattr(tensor, 'ds_shape', tensor.shape))}, {tensor.dtype}{where}"


def broadcast_tensors(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Overwrite tensors with those of rank 0, some at a time; a collective, unless there is nothing to send.

    Args:
        tensors: As many on each rank, in the same order, of the same shapes and dtypes, on any device.
        device: The device of the broadcasts.
    """
    if dist.get_world_size() == 1:
        return
    plain = [tensor for tensor in tensors if _is_plain(tensor)]
    plain.sort(key=lambda tensor: -tensor.itemsize)  # so that each begins at a multiple of its element's size
    with torch.no_grad():
        for some in _chunks(plain):
            _broadcast(some, device)


def _is_plain(tensor: Tensor) -> bool:
    is_there = tensor.numel() > 0 and not tensor.is_meta
    return is_there and tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)  # such as DTensor


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    some: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if some and size + tensor.nbytes > _BYTES:
            yield some
            some, size = [], 0
        some.append(tensor)
        size += tensor.nbytes
    if some:
        yield some


def _broadcast(tensors: list[Tensor], device: torch.device) -> None:
    parts = [tensor.reshape(-1).view(torch.uint8).to(device) for tensor in tensors]
    flat = torch.cat(parts)
    dist.broadcast(flat, 0)
    if dist.get_rank() == 0:
        return
    received: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # one kernel for each dtype
    for tensor, part in zip(tensors, flat.split([len(part) for part in parts]), strict=True):
        value = part.view(tensor.dtype).view(tensor.shape)
        if tensor.device != flat.device:  # before a fit, when the module is not on its device yet
            tensor.copy_(value)
            continue
        targets, values = received.setdefault(tensor.dtype, ([], []))
        targets.append(tensor)
        values.append(value)
    for targets, values in received.values():
        torch._foreach_copy_(targets, values)
